// Paged variable-length attention. T query tokens of R requests lie end to end; each sees its own request's keys.
//
// A layer's cache, for KV head h and block b (heads first, so that a request's neighbouring blocks are read as one;
// V rows are padded to a multiple of 16, as `v_row`):
//   keys    [dim][block_size], and for bf16 in pairs along dim, [ceil(dim / 2)][block_size][2]
//   values  [block_size][v_row], and for bf16 in pairs along the keys, [ceil(block_size / 2)][v_row][2]
//   int8 has one scale for each key or value vector.
// One load of keys then serves 16 of them, and one of values 16 dimensions, with nothing to transpose or to sum across.
//
// The unit of work is an Item: some rows (query token, head of the group) of one request and KV head, so that all of
// them share each load. Softmax runs online over tiles of 32 keys inside partitions of 256, at fixed places; the
// partitions are merged in order, by whoever computed them (flash decoding). So a row's result depends on its request
// alone, never on the batch, the chunk or the number of threads.
#pragma once

#include "attention_items.h"
#include "attention_tile.h"

namespace {

constexpr int TILES_AHEAD = 1;  // that are prefetched

template <class T, class C>
struct Attend {
  const Attention& a;
  const int group, row;
  const Layout<C> layout;

  Attend(const Attention& a)
      : a(a),
        group(a.num_heads / a.num_kv_heads),
        row((int)v_row(a.v_dim)),
        layout(a.dim, (int)v_row(a.v_dim), a.block_size) {}

  static constexpr bool PAIRS = dotted<C> && dotted<T>;  // queries stay bf16, in pairs

  static size_t scratch_floats(const Attention& a) {
    const int64_t row = v_row(a.v_dim);
    return ITEM_ROWS * up(a.dim, 16) + 2 * State::floats((int)row) + 2 * TILE * up(most(a.dim, row), 16) + 256;
  }

  void run(const Item& item, float* scratch, float* partials, const Item* next) const {
    const int count = item.row_end - item.row_begin;
    float* q_floats = scratch;
    Rows_ rows{};
    rows.q = q_floats;
    State now(scratch + ITEM_ROWS * up(a.dim, 16), row), sum(now.m + State::floats(row), row);
    float* tile_copy = sum.m + State::floats(row);
    const int64_t token0 = a.cu_seqlens[item.request];
    int32_t low = 0x7fffffff, high = 0;
    for (int i = 0; i < count; i++) {
      const int64_t token = (item.row_begin + i) / group, head = item.head * group + (item.row_begin + i) % group;
      place_query((const T*)a.q + (token0 + token) * a.q_token + head * a.q_head, i, count, q_floats);
      rows.reach[i] = reach_of(a, item.request, token);
      low = rows.reach[i].low < low ? rows.reach[i].low : low;
      high = rows.reach[i].high > high ? rows.reach[i].high : high;
    }
    if (item.last - item.first > 1) sum.clear(count);
    for (int p = item.first; p < item.last; p++) {
      now.clear(count);
      const int begin = (int)most(low, p * PARTITION) / TILE * TILE, end = (int)least(high, (p + 1) * PARTITION);
      for (int start = begin; start < end; start += TILE) tile(item, rows, count, start, high, now, tile_copy, next);
      now.settle(count);
      if (item.last - item.first == 1) {
        finish(item, now, count, partials);
        return;
      }
      sum.merge(now, count);
    }
    finish(item, sum, count, partials);
  }

  // Parts of the same rows, one after the other in `items`, become one result.
  void merge(const Item* items, int64_t count, const float* partials, float* scratch) const {
    const int rows = items->row_end - items->row_begin;
    State sum(scratch, row);
    sum.clear(rows);
    for (int64_t i = 0; i < count; i++) sum.merge(State((float*)partials + items[i].partial, row, rows), rows);
    Item whole = *items;
    whole.partial = -1;
    finish(whole, sum, rows, nullptr);
  }

 private:
  struct Rows_ {
    const float* q;
    Reach reach[ITEM_ROWS];
  };

  // Row i of an item among the rows that are computed with it, as TileRows wants them.
  void place_query(const T* from, int i, int count, float* all) const {
    const int first = i / ATTEND_ROWS * ATTEND_ROWS, stride = (int)least(ATTEND_ROWS, count - first);
    float* to = all + first * up(a.dim, 16) + i - first;
    if constexpr (PAIRS) {
      for (int d = 0; d < a.dim; d += 2) {
        T pair[2] = {from[d], d + 1 < a.dim ? from[d + 1] : T{0}};
        memcpy(to + d / 2 * stride, pair, sizeof(pair));
      }
    } else {
      for (int d = 0; d < a.dim; d++) to[d * stride] = to_float(from[d]);
      if (a.dim % 2) to[a.dim * stride] = 0.f;
    }
  }

  void tile(const Item& item, const Rows_& rows, int count, int start, int high, State& state, float* copy,
            const Item* next) const {
    const int32_t* table = a.block_table + item.request * a.max_blocks;
    TileView<C> view = view_of(table, item.head, start, high, copy);
    view.ahead = ahead(item, table, start + TILES_AHEAD * TILE, high, next);
    for (int r = 0; r < count; r += ATTEND_ROWS) {
      const int n = (int)least(ATTEND_ROWS, count - r);
      int from = TILE, to = 0, all_from = 0, all_to = TILE;
      for (int i = 0; i < n; i++) {
        const int l = rows.reach[r + i].low - start, h = rows.reach[r + i].high - start;
        from = l < from ? l : from, to = h > to ? h : to;
        all_from = l > all_from ? l : all_from, all_to = h < all_to ? h : all_to;
      }
      if (to <= 0 || from >= TILE) continue;
      TileRows part{};
      part.masked = all_from > 0 || all_to < TILE;
      for (int i = 0; i < n; i++) {
        part.low[i] = rows.reach[r + i].low - start, part.high[i] = rows.reach[r + i].high - start;
      }
      part.from = from > 0 ? from : 0, part.to = to < TILE ? to : TILE;
      part.q = rows.q + r * up(a.dim, 16);
      part.m = state.m + r, part.lanes = state.lanes + r * W, part.acc = state.acc + (int64_t)r * row;
      attend_tile(layout, view, part, n, a.scale, a.softcap);
      view.ahead = {};  // once is enough
    }
  }

  // The tile that is so many keys further on, perhaps in the item that this thread computes next.
  Place ahead(const Item& item, const int32_t* table, int start, int high, const Item* next) const {
    if (start < high) return where(table, item.head, start);
    if (!next) return {};
    start += first_key(*next) - (int)up(high, TILE);
    const int end = a.seq_lens[next->request];
    return start < end ? where(a.block_table + next->request * a.max_blocks, next->head, start) : Place{};
  }

  int first_key(const Item& item) const {
    const int low = reach_of(a, item.request, item.row_begin / group).low;
    return (int)most(low, item.first * PARTITION) / TILE * TILE;
  }

  Place where(const int32_t* table, int head, int start) const {
    if (a.block_size % TILE) return {};
    const int64_t block = block_at(a, head, table[start / a.block_size]);
    const int inside = start % a.block_size;
    return {(const char*)layout.key(a.k_cache, block, inside), (const char*)layout.value(a.v_cache, block, inside)};
  }

  // Keys [start, start + 32) in one piece: where they lie, or a copy of them where blocks are smaller.
  TileView<C> view_of(const int32_t* table, int head, int start, int high, float* copy) const {
    TileView<C> view{};
    if (a.block_size % TILE == 0) {
      const int64_t block = block_at(a, head, table[start / a.block_size]);
      const int inside = start % a.block_size;
      view.keys = layout.key(a.k_cache, block, inside), view.key_stride = a.block_size;
      view.values = layout.value(a.v_cache, block, inside);
      if (a.k_scales) {
        view.key_scales = a.k_scales + block * a.block_size + inside;
        view.value_scales = a.v_scales + block * a.block_size + inside;
      }
      return view;
    }
    C* keys = (C*)copy;
    C* values = keys + TILE * up(most(a.dim, row), 16);
    for (int i = 0; i < TILE; i++) {
      if (start + i >= high) {
        layout.no_key(keys, i), layout.no_value(values, i);
        view.scales[0][i] = view.scales[1][i] = 0.f;
        continue;
      }
      const int64_t block = block_at(a, head, table[(start + i) / a.block_size]);
      const int inside = (start + i) % a.block_size;
      layout.copy_key(layout.key_block(a.k_cache, block), inside, keys, i);
      layout.copy_value(layout.value_block(a.v_cache, block), inside, values, i);
      if (a.k_scales) {
        view.scales[0][i] = a.k_scales[block * a.block_size + inside];
        view.scales[1][i] = a.v_scales[block * a.block_size + inside];
      }
    }
    view.keys = keys, view.values = values, view.key_stride = TILE, view.copied = true;
    return view;
  }

  void finish(const Item& item, const State& state, int count, float* partials) const {
    if (item.partial >= 0) {
      State to(partials + item.partial, row, count);
      memcpy(to.m, state.m, count * sizeof(float)), memcpy(to.l, state.l, count * sizeof(float));
      memcpy(to.acc, state.acc, (size_t)count * row * sizeof(float));
      return;
    }
    for (int i = 0; i < count; i++) {
      const int64_t token = a.cu_seqlens[item.request] + (item.row_begin + i) / group;
      const int64_t head = item.head * group + (item.row_begin + i) % group;
      float l = state.l[i], factor = 1.f;
      if (a.sinks) {  // one more key with a learned score and no value (gpt-oss)
        const float sink = a.sinks[head] * LOG2_E, m = sink > state.m[i] ? sink : state.m[i];
        factor = exp2f(state.m[i] - m);
        l = l * factor + exp2f(sink - m);
      }
      const float inverse = factor / l;
      T* out = (T*)a.out + token * a.out_token + head * a.v_dim;
      const float* acc = state.acc + (int64_t)i * row;
      for (int d = 0; d < a.v_dim; d += W) store_some(out + d, load(acc + d) * inverse, a.v_dim - d);
    }
  }
};

// All threads: `cut` is ready, and keys and values are stored.
template <class T, class C>
void attend_items(Workspace& ws, const Attention& a, const Cut& cut, float* scratch, Team& team) {
  const Attend<T, C> work(a);
  float* own = scratch + team.id * Attend<T, C>::scratch_floats(a);
  float* partials = (float*)ws.buffers[Workspace::PARTIALS].data;
  const auto attend = [&](int64_t i, int64_t next) {
    work.run(cut.items[cut.order[i]], own, partials, next >= 0 ? &cut.items[cut.order[next]] : nullptr);
  };
  team.each(cut.num_items, attend, Team::IN_TURN);
  team.each(cut.num_merges, [&](int64_t i, int64_t) {
    const int32_t begin = cut.merges[i].begin;
    work.merge(cut.items + begin, cut.merges[i].end - begin, partials, own);
  });
}

}  // namespace
