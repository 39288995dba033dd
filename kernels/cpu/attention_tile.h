// Up to ATTEND_ROWS queries times a tile of 32 keys: scores, online softmax, values.
#pragma once

#include "api.h"
#include "attention_items.h"
#include "elementwise.h"
#include "team.h"

namespace {

constexpr int TILE = 32;
constexpr float LOG2_E = 1.44269504f;
constexpr int ATTEND_ROWS = W == 16 ? 6 : 3;
constexpr int KEY_VECTORS = TILE / W < 4 ? TILE / W : 4;  // that are in registers at once

// How a block's keys and values lie; C is the type in the cache.
template <class C>
struct Layout {
  int dim, row, block_size;
  Layout(int dim, int row, int block_size) : dim(dim), row(row), block_size(block_size) {}

  int64_t key_size() const { return (int64_t)(paired<C> ? (dim + 1) / 2 * 2 : dim) * block_size; }
  int64_t value_size() const { return (int64_t)(paired<C> ? (block_size + 1) / 2 * 2 : block_size) * row; }
  C* key_block(void* cache, int64_t block) const { return (C*)cache + block * key_size(); }
  C* value_block(void* cache, int64_t block) const { return (C*)cache + block * value_size(); }
  // `inside` is even where blocks hold whole tiles
  const C* key(void* cache, int64_t block, int inside) const {
    return key_block(cache, block) + inside * (paired<C> ? 2 : 1);
  }
  const C* value(void* cache, int64_t block, int inside) const {
    return value_block(cache, block) + (int64_t)inside * row;
  }
  C& key_at(C* keys, int stride, int i, int d) const {
    return paired<C> ? keys[((int64_t)(d / 2) * stride + i) * 2 + d % 2] : keys[(int64_t)d * stride + i];
  }
  C& value_at(C* values, int i, int d) const {
    return paired<C> ? values[((int64_t)(i / 2) * row + d) * 2 + i % 2] : values[(int64_t)i * row + d];
  }
  void copy_key(C* from, int i, C* to, int j) const {
    for (int d = 0; d < (paired<C> ? (dim + 1) / 2 * 2 : dim); d++)
      key_at(to, TILE, j, d) = key_at(from, block_size, i, d);
  }
  void copy_value(C* from, int i, C* to, int j) const {
    for (int d = 0; d < row; d++) value_at(to, j, d) = value_at(from, i, d);
  }
  void no_key(C* to, int j) const {
    for (int d = 0; d < (paired<C> ? (dim + 1) / 2 * 2 : dim); d++) key_at(to, TILE, j, d) = C{};
  }
  void no_value(C* to, int j) const {
    for (int d = 0; d < row; d++) value_at(to, j, d) = C{};
  }
};

struct Place {
  const char *keys = nullptr, *values = nullptr;
};

template <class C>
struct TileView {
  const C *keys, *values;
  const float *key_scales, *value_scales;  // int8 alone
  int key_stride;
  bool copied;
  Place ahead;  // to be prefetched
  float scales[2][TILE];
};

struct TileRows {
  const void* q;  // [pairs of dim, or dim][rows]: all rows' first, then their second, and so on
  int low[ATTEND_ROWS], high[ATTEND_ROWS];  // keys of the tile that each sees
  int from, to;                             // that any of them sees
  bool masked;
  float *m, *lanes, *acc;
};

// scores[R][32] = q . keys
template <class C, int R>
[[gnu::noinline]] void scores_of(const Layout<C>& layout, const TileView<C>& view, const void* q, float* scores) {
  for (int c = 0; c < TILE; c += KEY_VECTORS * W) {
    vf s[R][KEY_VECTORS];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < KEY_VECTORS; j++) s[r][j] = vf{};
    const char* keys_ahead = c ? nullptr : view.ahead.keys;
    const int line = view.key_stride * (int)sizeof(C) * (paired<C> ? 2 : 1);
    if constexpr (paired<C>) {
      const uint32_t* k = (const uint32_t*)view.keys + c;
      for (int d = 0; d < (layout.dim + 1) / 2; d++, k += view.key_stride) {
        if (keys_ahead) {
          __builtin_prefetch(keys_ahead + (int64_t)d * line);
          __builtin_prefetch(keys_ahead + (int64_t)d * line + 64);
        }
        vu pair[KEY_VECTORS];
        for (int j = 0; j < KEY_VECTORS; j++) pair[j] = load_as<vu>(k + j * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#if defined(__AVX512BF16__)
          const __m512bh x = (__m512bh)_mm512_set1_epi32(load_as<int32_t>((const float*)q + d * R + r));
          for (int j = 0; j < KEY_VECTORS; j++) s[r][j] = (vf)_mm512_dpbf16_ps((__m512)s[r][j], (__m512bh)pair[j], x);
#else
          const float* x = (const float*)q + 2 * d * R + r;
          for (int j = 0; j < KEY_VECTORS; j++)
            s[r][j] += (vf)(pair[j] << 16) * x[0] + (vf)(pair[j] & 0xffff0000u) * x[R];
#endif
        }
      }
    } else {
      const C* k = view.keys + c;
      for (int d = 0; d < layout.dim; d++, k += view.key_stride) {
        if (keys_ahead)
          for (int b = 0; b < TILE * (int)sizeof(C); b += 64) __builtin_prefetch(keys_ahead + (int64_t)d * line + b);
        vf key[KEY_VECTORS];
        for (int j = 0; j < KEY_VECTORS; j++) key[j] = load(k + j * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          for (int j = 0; j < KEY_VECTORS; j++) s[r][j] += key[j] * ((const float*)q)[d * R + r];
      }
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < KEY_VECTORS; j++) store(scores + r * TILE + c + j * W, s[r][j]);
  }
}

// acc[R][V * W columns] += weights[R][32] . values, for keys [from, to) of the tile. `ahead`: the next tile's values,
// fetched here and not beside its keys, since a core waits for a limited number of lines at a time.
template <class C, int R, int V>
[[gnu::noinline]] void add_values(const Layout<C>& layout, const C* values, const void* weights, int from, int to,
                                  float* acc, const char* ahead) {
  vf s[R][V];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) s[r][j] = load(acc + (int64_t)r * layout.row + j * W);
  if constexpr (paired<C>) {
    const auto add = [&](int i, uint32_t mask) {
      const uint32_t* v = (const uint32_t*)values + (int64_t)i * layout.row;
      if (ahead)
        for (int j = 0; j < V; j++) __builtin_prefetch((const uint32_t*)ahead + (int64_t)i * layout.row + j * W);
      vu pair[V];
      for (int j = 0; j < V; j++) pair[j] = load_as<vu>(v + j * W) & mask;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#if defined(__AVX512BF16__)
        const __m512bh x = (__m512bh)_mm512_set1_epi32(load_as<int32_t>((const bf16*)weights + r * TILE + 2 * i));
        for (int j = 0; j < V; j++) s[r][j] = (vf)_mm512_dpbf16_ps((__m512)s[r][j], (__m512bh)pair[j], x);
#else
        const float* x = (const float*)weights + r * TILE + 2 * i;
        for (int j = 0; j < V; j++) s[r][j] += (vf)(pair[j] << 16) * x[0] + (vf)(pair[j] & 0xffff0000u) * x[1];
#endif
      }
    };
    // the other half of a pair at either end is no key of ours, and may be a NaN
    int i = from / 2;
    if (from % 2) {
      add(i, i * 2 + 1 < to ? 0xffff0000u : 0u);
      i++;
    }
    for (; i < to / 2; i++) add(i, 0xffffffffu);
    if (to % 2 && i * 2 + 1 == to) add(i, 0x0000ffffu);
  } else {
    const C* v = values + (int64_t)from * layout.row;
    for (int i = from; i < to; i++, v += layout.row) {
      vf value[V];
      for (int j = 0; j < V; j++) value[j] = load(v + j * W);
      if (ahead)
        for (int j = 0; j < V; j++) __builtin_prefetch((const C*)ahead + (int64_t)i * layout.row + j * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int j = 0; j < V; j++) s[r][j] += value[j] * ((const float*)weights)[r * TILE + i];
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) store(acc + (int64_t)r * layout.row + j * W, s[r][j]);
}

// Scores become weights; sums are kept lane by lane until State::settle. Everything is to the base of 2.
template <int R>
[[gnu::noinline]] void online_softmax(float* scores, const TileRows& rows, float scale, float softcap, float* factors) {
  vi index;
  for (int i = 0; i < W; i++) index[i] = i;
  const float by = softcap != 0.f ? scale / softcap : scale * LOG2_E;
  for (int r = 0; r < R; r++) {
    vf s[TILE / W], top = splat(-INFINITY);
    for (int j = 0; j < TILE / W; j++) {
      s[j] = load(scores + r * TILE + j * W) * by;
      if (softcap != 0.f) s[j] = softcap * LOG2_E * vtanh(s[j]);
      if (rows.masked) {
        const vi at = index + j * W;
        s[j] = select((at >= rows.low[r]) & (at < rows.high[r]), s[j], splat(-INFINITY));
      }
      top = select(s[j] > top, s[j], top);
    }
    const float before = rows.m[r];
    factors[r] = 1.f;
    if (any(top > splat(before))) {
      rows.m[r] = reduce_max(top);
      factors[r] = before == -INFINITY ? 0.f : exp2f(before - rows.m[r]);
    }
    // where nothing is seen yet every score is -inf, and so is every weight 0
    const float base = rows.m[r] == -INFINITY ? 0.f : rows.m[r];
    vf sum = load(rows.lanes + r * W) * factors[r];
    for (int j = 0; j < TILE / W; j++) {
      s[j] = vexp2(s[j] - base);
      sum += s[j];
      store(scores + r * TILE + j * W, s[j]);
    }
    store(rows.lanes + r * W, sum);
  }
}

template <class C, int R>
void attend_rows(const Layout<C>& layout, const TileView<C>& view, const TileRows& rows, float scale, float softcap) {
  alignas(64) float scores[R * TILE];
  alignas(64) uint16_t halves[R * TILE];
  float factors[R];
  scores_of<C, R>(layout, view, rows.q, scores);
  const float *key_scales = view.copied ? view.scales[0] : view.key_scales;
  const float *value_scales = view.copied ? view.scales[1] : view.value_scales;
  if constexpr (sizeof(C) == 1)
    for (int r = 0; r < R; r++)
      for (int i = 0; i < TILE; i += W)
        store(scores + r * TILE + i, load(scores + r * TILE + i) * load(key_scales + i));
  online_softmax<R>(scores, rows, scale, softcap, factors);
  const void* weights = scores;
  if constexpr (sizeof(C) == 1) {
    for (int r = 0; r < R; r++)
      for (int i = rows.from; i < rows.to; i++) scores[r * TILE + i] *= value_scales[i];
  } else if constexpr (dotted<C>) {
    for (int i = 0; i < R * TILE; i += W) store((bf16*)halves + i, load(scores + i));
    weights = halves;
  }
  for (int r = 0; r < R; r++)
    if (factors[r] != 1.f)
      for (int d = 0; d < layout.row; d += W)
        store(rows.acc + (int64_t)r * layout.row + d, load(rows.acc + (int64_t)r * layout.row + d) * factors[r]);
  for (int d = 0; d < layout.row;) {
    const int step = paired<C> ? 2 : 1;
    const char* ahead = view.ahead.values ? view.ahead.values + (int64_t)d * step * sizeof(C) : nullptr;
    const C* values = view.values + d * step;
    if (d + 4 * W <= layout.row) {
      add_values<C, R, 4>(layout, values, weights, rows.from, rows.to, rows.acc + d, ahead);
      d += 4 * W;
    } else {
      add_values<C, R, 1>(layout, values, weights, rows.from, rows.to, rows.acc + d, ahead);
      d += W;
    }
  }
}

template <class C>
void attend_tile(const Layout<C>& layout, const TileView<C>& view, const TileRows& rows, int count, float scale,
                 float softcap) {
#define CASE(R) case R: return attend_rows<C, (R <= ATTEND_ROWS ? R : ATTEND_ROWS)>(layout, view, rows, scale, softcap);
  switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

}  // namespace
