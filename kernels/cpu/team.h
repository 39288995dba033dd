// The threads of one parallel region, and memory that lasts from step to step.
#pragma once

#include <omp.h>
#include <stdlib.h>

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
  alignas(64) int64_t next_item = 0;
  ~Workspace() {
    for (Buffer& b : buffers) free(b.data);
    for (Buffer& b : cut_items) free(b.data);
    for (Buffer& b : cut_orders) free(b.data);
  }
};

namespace {

struct Team {
  int id, size;
  // The part of [0, count) that is this thread's.
  int64_t begin(int64_t count) const { return count * id / size; }
  int64_t end(int64_t count) const { return count * (id + 1) / size; }
  static void barrier() {
#pragma omp barrier
  }
};

template <class F>
void in_parallel(int threads, F work) {
#pragma omp parallel num_threads(threads)
  {
    Team team{omp_get_thread_num(), omp_get_num_threads()};
    work(team);
  }
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace
