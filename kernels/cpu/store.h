// New keys and values into the cache, by slot mapping.
#pragma once

#include "attention.h"

namespace {

inline float largest(const float* x, int size) {
  float m = 0.f;
  for (int i = 0; i < size; i++) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    m = a > m || a != a ? a : m;
  }
  return m;
}

// One vector as int8 and its scale: x is about scale * q.
inline float quantise(const float* x, int size, int8_t* q) {
  const float scale = largest(x, size) / 127.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
  for (int i = 0; i < size; i++) q[i] = (int8_t)lrintf(x[i] * inverse);
  return scale;
}

// Key k [dim] and value v [v_dim] of one head, in float, at a slot.
template <class C>
inline void store_key(const Attention& a, const Layout<C>& layout, int64_t slot, int head, const float* k) {
  const int64_t block = block_at(a, head, slot / a.block_size);
  const int inside = (int)(slot % a.block_size);
  C* keys = layout.key_block(a.k_cache, block);
  if constexpr (sizeof(C) == 1) {
    int8_t q[MOST_DIM];
    a.k_scales[block * a.block_size + inside] = quantise(k, a.dim, q);
    for (int d = 0; d < a.dim; d++) layout.key_at(keys, a.block_size, inside, d) = q[d];
  } else if constexpr (paired<C>) {
    alignas(64) C q[MOST_DIM + 2 * W];
    for (int d = 0; d < a.dim; d += W) store(q + d, load_some(k + d, a.dim - d));
    for (int d = 0; d < a.dim; d += 2) memcpy(&layout.key_at(keys, a.block_size, inside, d), q + d, 2 * sizeof(C));
  } else {
    for (int d = 0; d < a.dim; d++) put(&layout.key_at(keys, a.block_size, inside, d), k[d]);
  }
}

template <class C>
inline void store_value(const Attention& a, const Layout<C>& layout, int64_t slot, int head, const float* v) {
  const int64_t block = block_at(a, head, slot / a.block_size);
  const int inside = (int)(slot % a.block_size);
  C* values = layout.value_block(a.v_cache, block);
  if constexpr (sizeof(C) == 1) {
    int8_t q[MOST_DIM];
    a.v_scales[block * a.block_size + inside] = quantise(v, a.v_dim, q);
    memcpy(values + (int64_t)inside * layout.row, q, a.v_dim);
  } else if constexpr (paired<C>) {
    alignas(64) C q[MOST_DIM + W];
    for (int d = 0; d < a.v_dim; d += W) store(q + d, load_some(v + d, a.v_dim - d));
    C* to = values + (int64_t)(inside / 2) * layout.row * 2 + inside % 2;
    for (int d = 0; d < a.v_dim; d++) to[2 * d] = q[d];
  } else {
    C* to = values + (int64_t)inside * layout.row;
    for (int d = 0; d < a.v_dim; d += W) store_some(to + d, load_some(v + d, a.v_dim - d), a.v_dim - d);
  }
}

// k and v as the call has them.
template <class T, class C>
void store_tokens(const Attention& a, int64_t tokens, Team& team) {
  const Layout<C> layout(a.dim, (int)v_row(a.v_dim), a.block_size);
  team.stretches(tokens, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float x[MOST_DIM + W];
    for (int64_t t = begin; t < end; t++) {
      if (a.slots[t] < 0) continue;
      for (int h = 0; h < a.num_kv_heads; h++) {
        const T* k = (const T*)a.k + t * a.k_token + h * a.k_head;
        for (int d = 0; d < a.dim; d += W) store_some(x + d, load_some(k + d, a.dim - d), a.dim - d);
        store_key(a, layout, a.slots[t], h, x);
        const T* v = (const T*)a.v + t * a.v_token + h * a.v_head;
        for (int d = 0; d < a.v_dim; d += W) store_some(x + d, load_some(v + d, a.v_dim - d), a.v_dim - d);
        store_value(a, layout, a.slots[t], h, x);
      }
    }
  });
}

template <class T, class C>
int32_t attend_call(Workspace& ws, const Attention& a, int threads) {
  Cut cut;
  if (cut_items(ws.cut_items[0], ws.cut_orders[0], a, threads, cut) != OK) return NO_MEMORY;
  const size_t floats = threads * Attend<T, C>::scratch_floats(a);
  float* scratch = (float*)ws.buffers[Workspace::SCRATCH].need(floats * sizeof(float));
  void* partials = ws.buffers[Workspace::PARTIALS].need(cut.partial_floats * sizeof(float) + 1);
  if (!scratch || !partials) return NO_MEMORY;
  const int64_t tokens = a.cu_seqlens[a.num_requests];
  in_parallel(threads, [&](Team& team) {
    store_tokens<T, C>(a, tokens, team);
    attend_items<T, C>(ws, a, cut, scratch, team);
  });
  return OK;
}

}  // namespace
