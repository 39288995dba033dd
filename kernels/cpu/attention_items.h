// How a call of attention is cut into pieces of work, and what is kept of a piece until it is finished.
#pragma once

#include "api.h"
#include "team.h"

namespace {

constexpr int MOST_DIM = 512;
constexpr int PARTITION = 256;
constexpr int ITEM_ROWS = 48;

// Running maximum (to the base of 2), sum and weighted values of some rows.
struct State {
  float *m, *l, *lanes, *acc;
  int row;
  State(float* at, int row, int rows = ITEM_ROWS)
      : m(at), l(at + rows), lanes(at + 2 * rows), acc(at + (2 + W) * rows), row(row) {}
  static int64_t floats(int row, int rows = ITEM_ROWS) { return (int64_t)rows * (2 + W + row); }
  void clear(int count) {
    for (int i = 0; i < count; i++) m[i] = -INFINITY, l[i] = 0.f;
    memset(lanes, 0, (size_t)count * W * sizeof(float));
    memset(acc, 0, (size_t)count * row * sizeof(float));
  }
  void settle(int count) {
    for (int i = 0; i < count; i++) l[i] = reduce_add(load(lanes + i * W));
  }
  void merge(const State& other, int count) {
    for (int i = 0; i < count; i++) {
      if (other.m[i] == -INFINITY) continue;  // saw nothing
      const float top = m[i] > other.m[i] ? m[i] : other.m[i];
      const float ours = m[i] == -INFINITY ? 0.f : exp2f(m[i] - top), theirs = exp2f(other.m[i] - top);
      m[i] = top, l[i] = l[i] * ours + other.l[i] * theirs;
      float *to = acc + (int64_t)i * row, *from = other.acc + (int64_t)i * row;
      for (int d = 0; d < row; d += W) store(to + d, load(to + d) * ours + load(from + d) * theirs);
    }
  }
};

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

// The items [begin, end) that are parts of the same rows.
struct Merge {
  int32_t begin, end;
};

// How a call is cut into items: the same for all layers of a step that look alike.
struct Cut {
  int64_t num_items, num_merges, partial_floats;
  Item* items;
  int32_t* order;  // longest first; `items` itself keeps the parts of the same rows together
  Merge* merges;
};

inline Reach reach_of(const Attention& a, int64_t request, int64_t token) {
  const int32_t pos = a.seq_lens[request] - (a.cu_seqlens[request + 1] - a.cu_seqlens[request]) + (int32_t)token;
  int32_t low = 0;
  if (a.window) low = pos - a.window + 1 > 0 ? pos - a.window + 1 : 0;
  if (a.chunk && pos / a.chunk * a.chunk > low) low = pos / a.chunk * a.chunk;
  return {low, pos + 1};
}

// Where the block of that number lies, for one KV head: heads first.
inline int64_t block_at(const Attention& a, int head, int64_t number) { return head * a.num_blocks + number; }

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
  cut.order = (int32_t*)order.need(room * (sizeof(int32_t) + sizeof(Merge)) + 1);
  if (!cut.items || !cut.order) return NO_MEMORY;
  cut.merges = (Merge*)(cut.order + room);
  cut.num_items = cut.num_merges = cut.partial_floats = 0;
  for (int64_t r = 0; r < a.num_requests; r++) {
    const int64_t rows = (int64_t)(a.cu_seqlens[r + 1] - a.cu_seqlens[r]) * group;
    for (int64_t begin = 0; begin < rows; begin += ITEM_ROWS) {
      const int64_t end = least(begin + ITEM_ROWS, rows);
      const int32_t low = reach_of(a, r, begin / group).low, high = reach_of(a, r, (end - 1) / group).high;
      const int32_t first = low / PARTITION, last = (high - 1) / PARTITION + 1;
      for (int32_t h = 0; h < a.num_kv_heads; h++) {
        const bool apart = split && last - first > 1;
        const int64_t begin_item = cut.num_items;
        for (int32_t p = first; p < last; p = apart ? p + 1 : last) {
          Item& item = cut.items[cut.num_items++];
          item = {(int32_t)r, h, (int32_t)begin, (int32_t)end, p, apart ? p + 1 : last, -1, 0};
          item.cost = (least(high, (int64_t)item.last * PARTITION) - most(low, (int64_t)p * PARTITION)) * (end - begin);
          if (apart) {
            item.partial = cut.partial_floats;
            cut.partial_floats += State::floats((int)v_row(a.v_dim), (int)(end - begin));
          }
        }
        if (apart) cut.merges[cut.num_merges++] = {(int32_t)begin_item, (int32_t)cut.num_items};
      }
    }
  }
  sort_longest_first(cut);
  return OK;
}

}  // namespace
