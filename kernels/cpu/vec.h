// Vectors of W floats in the compiler's own vector types, so that one source serves every instruction set.
// Each variant of the library includes this once with its own flags; everything is in an anonymous namespace, since
// the linker must never merge functions that were compiled for different processors.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(__AVX512BF16__)
constexpr bool DOT = true;  // a product of bf16 pairs in one instruction
#else
constexpr bool DOT = false;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef int8_t vb __attribute__((vector_size(W)));

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class T>
constexpr bool paired = false;  // stored as pairs along the dimension that is summed over
template <>
constexpr bool paired<bf16> = true;
// the type that rows are multiplied in: bf16 pairs where there is an instruction for them, else float
template <class T>
constexpr bool dotted = paired<T> && DOT;

template <class V, class P>
inline V load_as(const P* p) {
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
inline vf as_float(V v) {
  return (vf)v;
}

inline vf splat(float x) { return x - vf{}; }
inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }

// ------------------------------------------------------------------------------------------------ loads and stores

inline vf load(const float* p) { return load_as<vf>(p); }
inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16); }
inline vf load(const int8_t* p) { return __builtin_convertvector(load_as<vb>(p), vf); }
inline vf load(const fp16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vu h = __builtin_convertvector(load_as<vh>(p), vu);
  vu sign = (h & 0x8000) << 16, body = (h & 0x7fff) << 13;
  vf scaled = (vf)body * 0x1p112f;  // the exponents' biases differ by 112; denormals come right too
  vu special = (vu)((vi)(h & 0x7c00) == 0x7c00);
  vu bits = (special & (body | 0x7f800000u)) | (~special & (vu)scaled);
  return (vf)(bits | sign);
#endif
}

inline void store(float* p, vf v) { memcpy(p, &v, sizeof(v)); }
inline vh to_bf16(vf v) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
  vu u = (vu)v;
  vu rounded = u + 0x7fff + ((u >> 16) & 1);
  vu nan = (vu)(v != v);
  return __builtin_convertvector(((nan & (u | 0x400000)) | (~nan & rounded)) >> 16, vh);
#endif
}
inline void store(bf16* p, vf v) {
  vh h = to_bf16(v);
  memcpy(p, &h, sizeof(h));
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline float to_float(fp16 x) {
  uint32_t body = (uint32_t)(x.bits & 0x7fff) << 13, sign = (uint32_t)(x.bits & 0x8000) << 16, u;
  float f;
  memcpy(&f, &body, 4);
  f *= 0x1p112f;
  memcpy(&u, &f, 4);
  if ((x.bits & 0x7c00) == 0x7c00) u = body | 0x7f800000u;
  u |= sign;
  memcpy(&f, &u, 4);
  return f;
}

inline void put(float* p, float f) { *p = f; }
inline void put(bf16* p, float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  p->bits = f != f ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void put(fp16* p, float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) {
    p->bits = (uint16_t)(sign | 0x7e00);
  } else if (a >= 0x477ff000) {  // rounds to 65536 or more
    p->bits = (uint16_t)(sign | 0x7c00);
  } else if (a < 0x38800000) {  // a denormal: adding 0.5 leaves its last bits, rounded, at the end
    float x;
    memcpy(&x, &a, 4);
    x += 0.5f;
    memcpy(&a, &x, 4);
    p->bits = (uint16_t)(sign | (a - 0x3f000000));
  } else {
    a += 0xfff + ((a >> 13) & 1) - 0x38000000;
    p->bits = (uint16_t)(sign | (a >> 13));
  }
}
inline void store(fp16* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#else
  for (int i = 0; i < W; i++) put(p + i, v[i]);
#endif
}

// ------------------------------------------------------------------------------------------------------ arithmetic

inline vf vmax(vf a, vf b) { return select(a > b, a, b); }

inline float reduce_max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}
inline float reduce_add(vf v) {
  // pairs of pairs, the same order on every processor of the same width
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[W];
  memcpy(s, &v, sizeof(v));
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
#endif
}

// e^x to 2 units in the last place; 0 below -87, NaN for NaN, and about 2^127 above 88.
inline vf vexp(vf x) {
  vi low = x < -87.f;
  x = select(x > 88.f, splat(88.f), x);
  vf t = x * 1.44269504088896f;
#if defined(__AVX512F__)
  vf n = (vf)_mm512_roundscale_ps((__m512)t, 0);
#else
  vf shifted = t + 12582912.f;  // 1.5 * 2^23: what is left are whole numbers
  vf n = shifted - 12582912.f;
#endif
  // in two pieces, so that n * log(2) is exact
  vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
#if defined(__AVX512F__)
  vf y = (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vi whole = __builtin_convertvector(n, vi);
  vf y = (vf)((vu)p + ((vu)whole << 23));  // unsigned, since it wraps far below
  y = select(x != x, x, y);
#endif
  return select(low, vf{}, y);
}

// 2^x to 3 units in the last place; 0 far below, NaN for NaN. For x up to 127.
inline vf vexp2(vf x) {
  x = select(x < -200.f, splat(-200.f), x);
#if defined(__AVX512F__)
  vf n = (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
  vf n = (x + 12582912.f) - 12582912.f;
#endif
  vf r = x - n;
  vf p = splat(1.33335581e-3f);
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 0.240226507f;
  p = p * r + 0.693147181f;
  p = p * r + 1.f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vi low = n < -126.f;
  vi whole = __builtin_convertvector(select(low, vf{}, n), vi);
  vf y = (vf)((vu)p + ((vu)whole << 23));  // unsigned, since it wraps far below
  return select(low, vf{}, select(x != x, x, y));
#endif
}

inline bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < W; i++) all |= mask[i];
  return all != 0;
#endif
}

inline vf vtanh(vf x) {
  x = select(x > 20.f, splat(20.f), select(x < -20.f, splat(-20.f), x));
  vf e = vexp(x * 2.f);
  return (e - 1.f) / (e + 1.f);
}

// Abramowitz and Stegun 7.1.26; absolute error 1.5e-7.
inline vf verf(vf x) {
  vi negative = x < 0.f;
  vf a = select(negative, -x, x);
  vf t = 1.f / (a * 0.3275911f + 1.f);
  vf p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf y = 1.f - p * t * vexp(-a * a);
  return select(negative, -y, y);
}

}  // namespace
