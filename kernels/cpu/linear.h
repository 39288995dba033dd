// The packed product: y[M, N] = x[M, K] W[N, K]^T, with what comes after it done on each finished piece.
// A piece is up to ROWS rows by one panel of 32 columns, held in registers for the whole of K. Every row sums in the
// same order whatever the rows beside it, so a result never depends on the batch.
#pragma once

#include "api.h"
#include "team.h"

namespace {

constexpr int PANEL = 32;
constexpr int ROWS = W == 16 ? 12 : 6;
constexpr int NEAR = 24;  // steps of K ahead that a panel is fetched where it is read once

// What a pass over a panel fetches on the way: where it begins, and how far it moves in each step of K. With one pass,
// that is the panel itself, further on; with several, each fetches its share of the next panel, so that memory works
// all the time and not only in the first pass.
struct Ahead {
  const char* from;
  int64_t step;
};

template <class T>
inline int64_t panel_size(int64_t depth) {  // in elements
  return (paired<T> ? up(depth, 2) : depth) * PANEL;
}

template <class T>
inline T* element(T* packed, int64_t depth, int64_t column, int64_t stride, int64_t offset, int64_t k) {
  T* panel = packed + (column / PANEL * stride + offset) * panel_size<T>(depth);
  int64_t lane = column % PANEL;
  return paired<T> ? panel + (k / 2 * PANEL + lane) * 2 + k % 2 : panel + k * PANEL + lane;
}

template <class T>
void pack_rows(T* weight, int64_t rows, int64_t depth, int64_t first, int stride, int offset, T* packed, bool unpack,
               int threads) {
  in_parallel(threads, [=](Team& team) {
    team.stretches(rows, 1, [=](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; n++)
        for (int64_t k = 0; k < depth; k++) {
          T* inside = element(packed, depth, first + n, stride, offset, k);
          if (unpack) weight[n * depth + k] = *inside;
          else *inside = weight[n * depth + k];
        }
    });
  });
}

// R rows times one panel, into out[R][32]. Rows are bf16 where `dotted`, and float elsewhere.
template <class T, int R>
inline void piece(const void* const* rows, const T* panel, int64_t depth, float* out, Ahead ahead) {
#if defined(__AVX512BF16__)
  if constexpr (dotted<T>) {
    vf s0[R], s1[R];
    for (int r = 0; r < R; r++) s0[r] = s1[r] = vf{};
    const int64_t pairs = (depth + 1) / 2;
    const uint32_t* b = (const uint32_t*)panel;
    for (int64_t k = 0; k < pairs; k++, b += PANEL) {
      __m512bh b0 = (__m512bh)load_as<vi>(b), b1 = (__m512bh)load_as<vi>(b + W);
      __builtin_prefetch(ahead.from + k * ahead.step);
      __builtin_prefetch(ahead.from + k * ahead.step + 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        __m512bh a = (__m512bh)_mm512_set1_epi32(load_as<int32_t>((const char*)rows[r] + k * 4));
        s0[r] = (vf)_mm512_dpbf16_ps((__m512)s0[r], b0, a);
        s1[r] = (vf)_mm512_dpbf16_ps((__m512)s1[r], b1, a);
      }
    }
    for (int r = 0; r < R; r++) store(out + r * PANEL, s0[r]), store(out + r * PANEL + W, s1[r]);
    return;
  }
#endif
  const float* const* a = (const float* const*)rows;
  for (int c = 0; c < PANEL; c += 2 * W) {
    vf s0[R], s1[R];
    for (int r = 0; r < R; r++) s0[r] = s1[r] = vf{};
    if constexpr (paired<T>) {
      const uint32_t* b = (const uint32_t*)panel + c;
      for (int64_t k = 0; k < depth; k += 2, b += PANEL) {
        vu p0 = load_as<vu>(b), p1 = load_as<vu>(b + W);
        __builtin_prefetch(ahead.from + k / 2 * ahead.step + c * 4);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) s0[r] += (vf)(p0 << 16) * a[r][k], s1[r] += (vf)(p1 << 16) * a[r][k];
        if (k + 1 == depth) break;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
          s0[r] += (vf)(p0 & 0xffff0000u) * a[r][k + 1], s1[r] += (vf)(p1 & 0xffff0000u) * a[r][k + 1];
      }
    } else {
      const T* b = panel + c;
      for (int64_t k = 0; k < depth; k++, b += PANEL) {
        vf b0 = load(b), b1 = load(b + W);
        __builtin_prefetch(ahead.from + k * ahead.step + c * sizeof(T));
        __builtin_prefetch(ahead.from + k * ahead.step + (c + W) * sizeof(T));
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) s0[r] += b0 * a[r][k], s1[r] += b1 * a[r][k];
      }
    }
    for (int r = 0; r < R; r++) store(out + r * PANEL + c, s0[r]), store(out + r * PANEL + c + W, s1[r]);
  }
}

template <class T>
inline void piece_of(int64_t count, const void* const* rows, const T* panel, int64_t depth, float* out, Ahead ahead) {
#define CASE(R) case R: return piece<T, (R <= ROWS ? R : ROWS)>(rows, panel, depth, out, ahead);
  switch (count) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
#undef CASE
}

// Rows as `piece` wants them. Where they must be converted, that is a phase of its own.
struct Rows {
  const char* data;
  int64_t bytes;  // from row to row
};
template <class T>
inline size_t rows_bytes(int64_t rows, int64_t depth) {
  if (sizeof(T) == 4 || (dotted<T> && depth % 2 == 0)) return 0;
  return rows * up(depth, 16) * (dotted<T> ? 2 : 4);
}
template <class T>
Rows prepare_rows(const T* x, int64_t x_row, int64_t rows, int64_t depth, void* scratch, Team& team) {
  if (rows_bytes<T>(rows, depth) == 0) return {(const char*)x, x_row * (int64_t)sizeof(T)};
  const int64_t padded = up(depth, 16);
  team.stretches(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      const T* from = x + m * x_row;
      if constexpr (dotted<T>) {
        T* to = (T*)scratch + m * padded;
        memcpy(to, from, depth * sizeof(T));
        memset(to + depth, 0, (padded - depth) * sizeof(T));
      } else {
        float* to = (float*)scratch + m * padded;
        int64_t k = 0;
        for (; k + W <= depth; k += W) store(to + k, load(from + k));
        for (; k < depth; k++) to[k] = to_float(from[k]);
      }
    }
  });
  return {(const char*)scratch, padded * (dotted<T> ? 2 : 4)};
}

// How [0, rows) is cut: as many full pieces as fit, and the rest in two halves rather than a full and a tiny one.
inline int64_t rows_of_piece(int64_t left) {
  if (left <= ROWS || left >= 2 * ROWS) return least(left, ROWS);
  return (left + 1) / 2;
}

inline int64_t passes_over(int64_t rows) {
  int64_t passes = 0;
  for (; rows > 0; passes++) rows -= rows_of_piece(rows);
  return passes;
}

template <int GROUP>
inline int64_t groups_of(const Linear& w) {
  const int64_t first = w.first_column / PANEL, last = (w.first_column + w.columns + PANEL - 1) / PANEL;
  return (last - first + GROUP - 1) / GROUP;
}

// Rows [begin, end) times the GROUP panels from g * GROUP on. `more`: the next panels will be wanted too. By value, so
// that what the inner loops need stays in registers.
template <class T, int GROUP, class F>
[[gnu::noinline]] void panels(Rows x, int64_t begin, int64_t end, Linear w, int64_t g, bool more, F done) {
  const T* packed = (const T*)w.packed;
  const int64_t first = w.first_column / PANEL, size = panel_size<T>(w.depth);
  const int64_t passes = passes_over(end - begin), line = PANEL * (paired<T> ? 4 : sizeof(T));
  int64_t pass = 0;
  for (int64_t m = begin; m < end; pass++) {
    const int64_t count = rows_of_piece(end - m);
    const void* at[ROWS];
    for (int64_t r = 0; r < count; r++) at[r] = x.data + (m + r) * x.bytes;
    alignas(64) float out[GROUP][ROWS][PANEL];
    for (int i = 0; i < GROUP; i++) {
      const int64_t panel = (first + g * GROUP + i) * w.panel_stride + w.panel_offset;
      const T* now = packed + panel * size;
      Ahead ahead{(const char*)now + NEAR * line, line};
      if (passes > 1 && more) {
        const int64_t bytes = size * sizeof(T), step = line / passes;
        ahead = {(const char*)(now + GROUP * w.panel_stride * size) + bytes * pass / passes, step};
      }
      piece_of<T>(count, at, now, w.depth, out[i][0], ahead);
    }
    for (int64_t r = 0; r < count; r++) done(m + r, (first + g * GROUP) * PANEL, &out[0][r][0]);
    m += count;
  }
}

// Calls done(row, first column, values of up to 32 columns, how many) for every piece of the product.
// `group` panels in a row belong together (gate and up): done gets their values one panel after the other.
template <class T, int GROUP, class F>
void multiply(Rows x, int64_t rows, const Linear& w, Team& team, F done) {
  const int64_t groups = groups_of<GROUP>(w);
  // Few panels and many threads: the rows are cut too. Long blocks of rows, since each reads the whole panel.
  int64_t blocks = 1;
  while (groups * blocks < 4 * team.size && rows > blocks * 4 * ROWS) blocks *= 2;
  team.each(groups * blocks, [&](int64_t item, int64_t next) {
    const int64_t b = item % blocks;
    panels<T, GROUP>(x, rows * b / blocks, rows * (b + 1) / blocks, w, item / blocks, blocks == 1 && next >= 0, done);
  });
}

// out[row, column] = product + bias, for the columns that a Linear names.
template <class T>
void linear_in(Rows x, int64_t rows, const Linear& w, T* out, int64_t out_row, Team& team) {
  multiply<T, 1>(x, rows, w, team, [&](int64_t row, int64_t column, const float* values) {
    const int64_t from = most(w.first_column - column, 0), to = least(w.first_column + w.columns - column, PANEL);
    T* y = out + row * out_row + column - w.first_column;
    const float* bias = w.bias ? w.bias + column - w.first_column : nullptr;
    if (from == 0 && to == PANEL) {
      for (int j = 0; j < PANEL; j += W) store(y + j, bias ? load(values + j) + load(bias + j) : load(values + j));
    } else {
      for (int64_t j = from; j < to; j++) put(y + j, values[j] + (bias ? bias[j] : 0.f));
    }
  });
}

}  // namespace
