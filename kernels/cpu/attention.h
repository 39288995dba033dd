// Paged variable-length attention. T query tokens of R requests lie end to end; each sees its own request's keys.
//
// A layer's cache, for block b and KV head h (V rows are padded to a multiple of 16, as `v_row`):
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

#include "attention_tile.h"

namespace {

constexpr int PARTITION = 256;
constexpr int ITEM_ROWS = 48;

struct Item {
  int32_t request, head;
  int32_t row_begin, row_end;        // of the request's tokens * group rows, token by token
  int32_t first, last;               // partitions [first, last)
  int64_t partial;                   // where its parts go, in floats; negative: it is finished at once
  int64_t cost;
};

struct Reach {
  int32_t low, high;  // keys [low, high)
};

// How a call is cut into items: the same for all layers of a step that look alike.
struct Cut {
  int64_t num_items, partial_floats;
  Item* items;
  int32_t* order;  // longest first; `items` itself keeps the parts of the same rows together
};

inline Reach reach_of(const Attention& a, int64_t request, int64_t token) {
  const int32_t pos = a.seq_lens[request] - (a.cu_seqlens[request + 1] - a.cu_seqlens[request]) + (int32_t)token;
  int32_t low = 0;
  if (a.window) low = pos - a.window + 1 > 0 ? pos - a.window + 1 : 0;
  if (a.chunk && pos / a.chunk * a.chunk > low) low = pos / a.chunk * a.chunk;
  return {low, pos + 1};
}

inline int64_t v_row(int64_t v_dim) { return up(v_dim, 16); }

inline void sort_longest_first(Cut& cut) {
  const Item* items = cut.items;
  int32_t* order = cut.order;
  for (int64_t i = 0; i < cut.num_items; i++) order[i] = (int32_t)i;
  for (int64_t gap = cut.num_items / 2; gap; gap /= 2)  // Shell's sort: no library template that a linker could merge
    for (int64_t i = gap; i < cut.num_items; i++) {
      const int32_t moving = order[i];
      int64_t j = i;
      for (; j >= gap && items[order[j - gap]].cost < items[moving].cost; j -= gap) order[j] = order[j - gap];
      order[j] = moving;
    }
}

// Where there are few items for the threads, partitions become items of their own.
inline int32_t cut_items(Buffer& items, Buffer& order, const Attention& a, int threads, Cut& cut) {
  const int group = a.num_heads / a.num_kv_heads;
  int64_t whole = 0, parts = 0;
  for (int64_t r = 0; r < a.num_requests; r++) {
    const int64_t rows = (int64_t)(a.cu_seqlens[r + 1] - a.cu_seqlens[r]) * group;
    whole += (rows + ITEM_ROWS - 1) / ITEM_ROWS * a.num_kv_heads;
    parts += (rows + ITEM_ROWS - 1) / ITEM_ROWS * a.num_kv_heads * (a.seq_lens[r] / PARTITION + 2);
  }
  const bool split = whole < 8 * threads;
  const int64_t room = split ? parts : whole;
  cut.items = (Item*)items.need(room * sizeof(Item) + 1);
  cut.order = (int32_t*)order.need(room * sizeof(int32_t) + 1);
  if (!cut.items || !cut.order) return NO_MEMORY;
  cut.num_items = cut.partial_floats = 0;
  for (int64_t r = 0; r < a.num_requests; r++) {
    const int64_t rows = (int64_t)(a.cu_seqlens[r + 1] - a.cu_seqlens[r]) * group;
    for (int64_t begin = 0; begin < rows; begin += ITEM_ROWS) {
      const int64_t end = least(begin + ITEM_ROWS, rows);
      const int32_t low = reach_of(a, r, begin / group).low, high = reach_of(a, r, (end - 1) / group).high;
      const int32_t first = low / PARTITION, last = (high - 1) / PARTITION + 1;
      for (int32_t h = 0; h < a.num_kv_heads; h++) {
        const bool apart = split && last - first > 1;
        for (int32_t p = first; p < last; p = apart ? p + 1 : last) {
          Item& item = cut.items[cut.num_items++];
          item = {(int32_t)r, h, (int32_t)begin, (int32_t)end, p, apart ? p + 1 : last, -1, 0};
          item.cost = (least(high, (int64_t)item.last * PARTITION) - most(low, (int64_t)p * PARTITION)) * (end - begin);
          if (apart) {
            item.partial = cut.partial_floats;
            cut.partial_floats += (end - begin) * (2 + v_row(a.v_dim));
          }
        }
      }
    }
  }
  sort_longest_first(cut);
  return OK;
}

template <class T, class C>
struct Attend {
  const Attention& a;
  const int group, row;
  const Layout<C> layout;

  Attend(const Attention& a)
      : a(a), group(a.num_heads / a.num_kv_heads), row((int)v_row(a.v_dim)), layout(a.dim, (int)v_row(a.v_dim), a.block_size) {}

  static size_t scratch_floats(const Attention& a) {
    const int64_t row = v_row(a.v_dim);
    return ITEM_ROWS * (up(a.dim, 16) + 2 * row + 4) + 2 * TILE * up(most(a.dim, row), 16) + 256;
  }

  void run(const Item& item, float* scratch, float* partials, const Item* next) const {
    const int count = item.row_end - item.row_begin;
    Rows_ rows{};
    float* q_floats = scratch;
    State now(scratch + ITEM_ROWS * up(a.dim, 16), row), sum(now.end(), row);
    float* tile_copy = sum.end();
    const int64_t token0 = a.cu_seqlens[item.request];
    int32_t low = 0x7fffffff, high = 0;
    for (int i = 0; i < count; i++) {
      const int64_t token = (item.row_begin + i) / group, head = item.head * group + (item.row_begin + i) % group;
      const T* q = (const T*)a.q + (token0 + token) * a.q_token + head * a.q_head;
      rows.reach[i] = reach_of(a, item.request, token);
      low = rows.reach[i].low < low ? rows.reach[i].low : low;
      high = rows.reach[i].high > high ? rows.reach[i].high : high;
      if (dotted<C> && dotted<T> && a.dim % 2 == 0) {
        rows.q[i] = q;
      } else {
        float* copy = q_floats + i * up(a.dim, 16);
        copy_row(q, a.dim, copy);
        rows.q[i] = copy;
      }
    }
    if (item.last - item.first > 1) sum.clear(count);
    for (int p = item.first; p < item.last; p++) {
      now.clear(count);
      const int begin = (int)most(low, p * PARTITION) / TILE * TILE, end = (int)least(high, (p + 1) * PARTITION);
      for (int start = begin; start < end; start += TILE) tile(item, rows, count, start, high, now, tile_copy, next);
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
    const void* q[ITEM_ROWS];
    Reach reach[ITEM_ROWS];
  };

  static void copy_row(const T* from, int size, float* to) {
    if constexpr (dotted<C> && dotted<T>) {  // an odd size: bf16 with a zero at the end
      memcpy(to, from, size * sizeof(T));
      ((T*)to)[size] = T{0};
    } else {
      for (int i = 0; i < size; i += W) store_some(to + i, load_some(from + i, size - i), size - i);
    }
  }

  void tile(const Item& item, const Rows_& rows, int count, int start, int high, State& state, float* copy,
            const Item* next) const {
    const int32_t* table = a.block_table + item.request * a.max_blocks;
    TileView<C> view = view_of(table, item.head, start, high, copy);
    view.ahead = start + TILE < high ? where(table, item.head, start + TILE)
                 : next ? where(a.block_table + next->request * a.max_blocks, next->head, first_key(*next))
                        : where(table, item.head, start);
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
        part.q[i] = rows.q[r + i];
        part.low[i] = rows.reach[r + i].low - start, part.high[i] = rows.reach[r + i].high - start;
      }
      part.from = from > 0 ? from : 0, part.to = to < TILE ? to : TILE;
      part.m = state.m + r, part.l = state.l + r, part.acc = state.acc + (int64_t)r * row;
      attend_tile(layout, view, part, n, a.scale, a.softcap);
      view.ahead = {};  // once is enough
    }
  }

  int first_key(const Item& item) const {
    const int low = reach_of(a, item.request, item.row_begin / group).low;
    return (int)most(low, item.first * PARTITION) / TILE * TILE;
  }

  Place where(const int32_t* table, int head, int start) const {
    if (a.block_size % TILE) return {};
    const int64_t block = (int64_t)table[start / a.block_size] * a.num_kv_heads + head;
    const int inside = start % a.block_size;
    return {(const char*)layout.key(a.k_cache, block, inside), (const char*)layout.value(a.v_cache, block, inside)};
  }

  // Keys [start, start + 32) in one piece: where they lie, or a copy of them where blocks are smaller.
  TileView<C> view_of(const int32_t* table, int head, int start, int high, float* copy) const {
    TileView<C> view{};
    if (a.block_size % TILE == 0) {
      const int64_t block = (int64_t)table[start / a.block_size] * a.num_kv_heads + head;
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
      const int64_t block = (int64_t)table[(start + i) / a.block_size] * a.num_kv_heads + head;
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
        const float m = a.sinks[head] > state.m[i] ? a.sinks[head] : state.m[i];
        factor = expf(state.m[i] - m);
        l = l * factor + expf(a.sinks[head] - m);
      }
      const float inverse = factor / l;
      T* out = (T*)a.out + token * a.out_token + head * a.v_dim;
      const float* acc = state.acc + (int64_t)i * row;
      for (int d = 0; d < a.v_dim; d += W) store_some(out + d, load(acc + d) * inverse, a.v_dim - d);
    }
  }
};

// All threads: `cut` is ready, `next_item` is zero, and keys and values are stored.
template <class T, class C>
void attend_items(Workspace& ws, const Attention& a, const Cut& cut, float* scratch, Team team) {
  const Attend<T, C> work(a);
  float* own = scratch + team.id * Attend<T, C>::scratch_floats(a);
  float* partials = (float*)ws.buffers[Workspace::PARTIALS].data;
  const auto take = [&] { return __atomic_fetch_add(&ws.next_item, 1, __ATOMIC_RELAXED); };
  for (int64_t i = take(), next; i < cut.num_items; i = next) {
    next = take();
    work.run(cut.items[cut.order[i]], own, partials, next < cut.num_items ? &cut.items[cut.order[next]] : nullptr);
  }
  if (cut.partial_floats == 0) return;
  team.barrier();
  int64_t turn = 0;
  for (int64_t i = 0; i < cut.num_items;) {
    int64_t count = 1;
    if (cut.items[i].partial >= 0) {
      while (i + count < cut.num_items && cut.items[i + count].first == cut.items[i + count - 1].last &&
             cut.items[i + count].partial >= 0 && cut.items[i + count].head == cut.items[i].head &&
             cut.items[i + count].request == cut.items[i].request && cut.items[i + count].row_begin == cut.items[i].row_begin)
        count++;
      if (turn++ % team.size == team.id) work.merge(cut.items + i, count, partials, own);
    }
    i += count;
  }
}

}  // namespace
