// The score at which a filter cuts, found by selection: no sorting, and exact.
#pragma once

#include "elementwise.h"

namespace {

constexpr int HALF = W / 2;
typedef double vd __attribute__((vector_size(HALF * 8)));
typedef uint64_t vl __attribute__((vector_size(HALF * 8)));
typedef float vfh __attribute__((vector_size(HALF * 4)));

// e^x to the last place or so, for x <= 0; 0 below -707.
inline vd exp_double(vd x) {
  constexpr double SHIFT = 0x1.8p52;  // what is left are whole numbers, in the last bits
  vd shifted = x * 1.4426950408889634 + SHIFT, n = shifted - SHIFT;
  vd r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  constexpr double SERIES[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                               1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,
                               1.0};
  vd p = 1.0 / 6227020800 - vd{};
  for (double c : SERIES) p = p * r + c;
  vl scaled = (vl)p + ((vl)shifted << 52);
  return x < -707.0 ? vd{} : (vd)scaled;
}

inline double total_of(vd v) {
  double sum = 0;
  for (int i = 0; i < HALF; i++) sum += v[i];
  return sum;
}

// The end of a row: `left` elements, and `fill` after them.
inline vf load_end(const float* p, int64_t left, float fill) {
  if (left >= W) return load(p);
  vf v = splat(fill);
  for (int64_t i = 0; i < left; i++) v[i] = p[i];
  return v;
}

// For each mask of eight lanes, those in it and then anything.
struct Orders {
  uint8_t lanes[256][8] = {};
  constexpr Orders() {
    for (int mask = 0; mask < 256; mask++)
      for (int i = 0, n = 0; i < 8; i++)
        if (mask >> i & 1) lanes[mask][n++] = (uint8_t)i;
  }
};

// Writes the lanes in `keep` one after the other, and anything up to W; returns how many they are.
template <class V, class T>
inline int64_t put_kept(vi keep, V v, T* to) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_movepi32_mask((__m512i)keep);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, (__m512i)v));
  return __builtin_popcount(mask);
#elif defined(__AVX2__)
  static constexpr Orders orders;
  const int mask = _mm256_movemask_ps((__m256)keep);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)orders.lanes[mask]));
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32((__m256i)v, order));
  return __builtin_popcount(mask);
#else
  int64_t n = 0;
  for (int i = 0; i < W; i++) {
    to[n] = v[i];
    n -= keep[i];
  }
  return n;
#endif
}

struct ByCount {
  vd operator()(vi mask, vf) const {
    vd sum{};
    for (int i = 0; i < HALF; i++) sum[i] = -(mask[i] + mask[i + HALF]);
    return sum;
  }
  double of(float) const { return 1; }
};

// By probability, relative to that of the largest score.
struct ByWeight {
  double top;
  void each(vf s, vd* low, vd* high) const {
    vfh half[2];
    memcpy(half, &s, sizeof(s));
    *low = exp_double(__builtin_convertvector(half[0], vd) - top);
    *high = exp_double(__builtin_convertvector(half[1], vd) - top);
  }
  vd operator()(vi mask, vf s) const {
    vd low, high;
    each(select(mask, s, splat(-INFINITY)), &low, &high);
    return low + high;
  }
  double of(float s) const { return exp_double((double)s - top - vd{})[0]; }
  double mass(const float* s, int64_t count) const {
    vd sum{}, low, high;
    for (int64_t i = 0; i < count; i += W) {
      each(load_end(s + i, count - i, -INFINITY), &low, &high);
      sum += low + high;
    }
    return total_of(sum);
  }
};

struct Threshold {
  float value;
  int64_t equal;  // how many there are of it
  double below;   // the mass of all that are less
};

inline float middle(float a, float b, float c) {
  return a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
}

// The least x such that the mass of all up to it, and of what lies `below` them, is not `spare`; INFINITY if there is
// none. Destroys x.
template <class Weigh, class Spare>
Threshold threshold_of(float* x, int64_t count, double below, Weigh weigh, Spare spare) {
  Threshold found{INFINITY, 0, 0};
  while (count) {
    const float pivot = middle(x[0], x[count / 2], x[count - 1]);
    vd sum{};
    vi same{};
    for (int64_t i = 0; i < count; i += W) {
      const vf v = load_end(x + i, count - i, NAN);
      sum += weigh(v < pivot, v);
      same -= v == pivot;
    }
    int64_t equal = 0;
    for (int i = 0; i < W; i++) equal += same[i];
    const double less = below + total_of(sum), upto = less + equal * weigh.of(pivot);
    const bool higher = spare(upto);
    if (higher)
      below = upto;
    else
      found = {pivot, equal, less};
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += W) {
      const vf v = load_end(x + i, count - i, NAN);
      kept += put_kept(higher ? v > pivot : v < pivot, v, x + kept);
    }
    count = kept;
  }
  return found;
}

}  // namespace
