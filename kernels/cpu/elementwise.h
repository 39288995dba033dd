// Norms, activations and rotary embeddings, row by row.
#pragma once

#include "api.h"
#include "team.h"

namespace {

inline vf activate(int32_t kind, vf x) {
  switch (kind) {
    case SILU: return x / (1.f + vexp(-x));
    case GELU_TANH: return 0.5f * x * (1.f + vtanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case GELU_ERF: return 0.5f * x * (1.f + verf(x * 0.7071067811865476f));
    case RELU: return select(x < 0.f, vf{}, x);
    case RELU2: x = select(x < 0.f, vf{}, x); return x * x;
    default: return x;
  }
}

// Loads and stores of a row's end: `left` elements, in [1, W].
template <class T>
inline vf load_some(const T* p, int64_t left) {
  if (left >= W) return load(p);
  T few[W] = {};
  memcpy(few, p, left * sizeof(T));
  return load(few);
}
template <class T>
inline void store_some(T* p, vf v, int64_t left) {
  if (left >= W) return store(p, v);
  T few[W];
  store(few, v);
  memcpy(p, few, left * sizeof(T));
}

// out = norm(x) of one row. In and out may be the same.
template <class X, class Y>
inline void norm_row(const Norm& n, const X* x, int64_t size, Y* out) {
  vf sum{}, squares{};
  if (n.centred)
    for (int64_t i = 0; i < size; i += W) sum += load_some(x + i, size - i);
  const float mean = n.centred ? reduce_add(sum) / size : 0.f;
  for (int64_t i = 0; i < size; i += W) {
    vf v = load_some(x + i, size - i) - mean;
    if (n.centred && size - i < W)
      for (int64_t j = size - i; j < W; j++) v[j] = 0.f;
    squares += v * v;
  }
  const float scale = 1.f / sqrtf(reduce_add(squares) / size + n.eps);
  for (int64_t i = 0; i < size; i += W) {
    vf v = (load_some(x + i, size - i) - mean) * scale * load_some(n.weight + i, size - i);
    if (n.bias) v += load_some(n.bias + i, size - i);
    store_some(out + i, v, size - i);
  }
}

// One head's rotation in float, in place. Halves (Llama) or neighbours (GPT-J, GLM) turn together.
inline void rotate(float* x, const float* cos, const float* sin, int dim, bool neighbours) {
  const int half = dim / 2;
  if (neighbours) {
    for (int i = 0; i < dim; i += 2) {
      const float a = x[i], b = x[i + 1];
      x[i] = a * cos[i] - b * sin[i];
      x[i + 1] = b * cos[i + 1] + a * sin[i + 1];
    }
    return;
  }
  int i = 0;
  for (; i + W <= half; i += W) {
    vf a = load(x + i), b = load(x + half + i);
    store(x + i, a * load(cos + i) - b * load(sin + i));
    store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

}  // namespace
