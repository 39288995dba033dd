// The threads of one parallel region, and memory that lasts from step to step.
#pragma once

#include <stdlib.h>

#include "meeting.h"
#include "vec.h"

struct Buffer {
#ifdef __SANITIZE_ADDRESS__
  static constexpr bool EXACT = true;  // no room to spare: a byte past the end is noticed
#else
  static constexpr bool EXACT = false;
#endif
  void* data = nullptr;
  size_t size = 0;
  // At least `bytes`, aligned to 64, with no promise about the content; nullptr if there is no memory. Inlined, since
  // the linker would keep one variant's copy for all.
  [[gnu::always_inline]] void* need(size_t bytes) {
    if (bytes > size || (EXACT && bytes < size)) {
      free(data);
      size = EXACT ? bytes : (bytes + bytes / 4 + 4095) / 4096 * 4096;
      if (posix_memalign(&data, EXACT ? 64 : 4096, size) != 0) data = nullptr, size = 0;
    }
    return data;
  }
};

// Belongs to one caller at a time.
struct Workspace {
  enum { ROWS, PARTIALS, SCRATCH, STREAM, SECOND, NORMED, NORMED_TOO, QKV, ATTENDED, ACTIVE, BEST, NUM_BUFFERS };
  enum { MOST_CUTS = 8 };
  Buffer buffers[NUM_BUFFERS], cut_items[MOST_CUTS], cut_orders[MOST_CUTS];
  int64_t cut_layers[MOST_CUTS];  // a layer that each was made for
  ~Workspace() {
    for (Buffer& b : buffers) free(b.data);
    for (Buffer& b : cut_items) free(b.data);
    for (Buffer& b : cut_orders) free(b.data);
  }
};

namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// One thread of a parallel region. All threads call the same phases in the same order.
struct Team {
  int id, size;
  Meeting* meeting;
  uint32_t phase = 0;

  // Calls work(i, next) for every i in [0, count) and returns when all are done. `next` is the item that this thread
  // will probably have then, or -1: something to prefetch. Items lie together in a thread's range, or are dealt out in
  // turn, which is right for a list that begins with the longest.
  enum Order { TOGETHER, IN_TURN };
  template <class F>
  void each(int64_t count, F work, Order order = TOGETHER) {
    phase++;
    if (count == 0) return;
    const int64_t ranges = least(size, Meeting::MOST_RANGES);
    for (int64_t k = 0; k < ranges; k++) {
      // Others' ranges only after a while: to look at one costs its owner a cache miss.
      if (k == 1 && meeting->wait(phase, count, Meeting::BRIEFLY)) return;
      const int64_t r = (id + k) % ranges, first = order == IN_TURN ? r : count * r / ranges;
      const int64_t step = order == IN_TURN ? ranges : 1;
      const int64_t length = order == IN_TURN ? (count - r + ranges - 1) / ranges : count * (r + 1) / ranges - first;
      int64_t mine = 0;
      for (Meeting::Taken some; (some = meeting->take(r, phase, length)).end;)
        for (int64_t i = some.begin; i < some.end; i++, mine++)
          work(first + i * step, i + 1 < length ? first + (i + 1) * step : -1);
      if (mine) meeting->add(phase, mine, count);
    }
    if (!meeting->wait(phase, count, Meeting::AS_LONG_AS_AN_ITEM)) meeting->sleep(phase, count);
  }

  // The same for work(begin, end) on stretches of [0, count): up to four for each thread, of `grain` at least.
  template <class F>
  void stretches(int64_t count, int64_t grain, F work) {
    const int64_t length = most(grain, (count + 4 * size - 1) / (4 * size));
    each((count + length - 1) / length,
         [&](int64_t i, int64_t) { work(i * length, least((i + 1) * length, count)); });
  }
};

template <class F>  // work(team), where the team may be changed
void in_parallel(int threads, F work) {
  Meeting meeting;
#pragma omp parallel num_threads(threads)
  {
    Team team{omp_get_thread_num(), omp_get_num_threads(), &meeting};
    work(team);
  }
}

}  // namespace
