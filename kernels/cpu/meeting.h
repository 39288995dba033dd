// Where the threads of a parallel region take their work, and where they wait for one another.
//
// Work comes in phases, and a phase in items. A thread takes the items of its own range, then those that other threads
// have left, and a phase is over when its *items* are done: nobody waits for a thread that holds none, and one that
// comes late passes over what is finished. So a thread that the system has put aside for another program holds up the
// rest only by the item in its hands. Who waits longer than an item should take goes to sleep, which gives the system a
// core to continue that thread on.
#pragma once

#include <omp.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

namespace {

class Meeting {
 public:
  enum { MOST_RANGES = 64 };

  Meeting() {
    for (Word& word : taken) word.value = 0;
    done.value = 0;
  }
  ~Meeting() { pthread_mutex_destroy(&mutex), pthread_cond_destroy(&is_over); }

  struct Taken {
    int64_t begin, end;
  };

  // Half of what a range of `length` items has left; nothing if there is none. In halves, since an atomic operation
  // stops the processor's loads for a while: one for each item cost 5 % at 16 rows.
  Taken take(int64_t range, uint32_t phase, int64_t length) {
    uint64_t& word = taken[range].value;
    uint64_t seen = __atomic_load_n(&word, __ATOMIC_RELAXED);
    for (;;) {
      if (phase_of(seen) > phase) return {};
      const int64_t begin = phase_of(seen) == phase ? (uint32_t)seen : 0, end = begin + (length - begin + 1) / 2;
      if (begin >= length) return {};
      if (__atomic_compare_exchange_n(&word, &seen, both(phase, end), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return {begin, end};
    }
  }

  // The caller has done that many more of the phase's `count` items.
  void add(uint32_t phase, int64_t more, int64_t count) {
    uint64_t seen = __atomic_load_n(&done.value, __ATOMIC_RELAXED), now;
    do now = (phase_of(seen) == phase ? seen : both(phase, 0)) + more;
    while (!__atomic_compare_exchange_n(&done.value, &seen, now, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    if (now == both(phase, count) && __atomic_load_n(&sleeping, __ATOMIC_SEQ_CST) > 0) {
      pthread_mutex_lock(&mutex);
      pthread_cond_broadcast(&is_over);
      pthread_mutex_unlock(&mutex);
    }
  }

  enum Spins { BRIEFLY = 32, AS_LONG_AS_AN_ITEM = 2000 };
  // Whether all of the phase's items are done by then.
  bool wait(uint32_t phase, int64_t count, Spins spins) {
    for (int i = 0; i < spins; i++) {
      if (over(phase, count)) return true;
      relax();
    }
    return false;
  }

  // Returns when they are.
  void sleep(uint32_t phase, int64_t count) {
    pthread_mutex_lock(&mutex);
    __atomic_add_fetch(&sleeping, 1, __ATOMIC_SEQ_CST);
    while (!over(phase, count)) {
      // In naps: each time that a core falls idle, the system looks for a thread to continue there.
      timespec until;
      clock_gettime(CLOCK_REALTIME, &until);
      until.tv_nsec += NAP_NS;
      if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
      pthread_cond_timedwait(&is_over, &mutex, &until);
    }
    __atomic_sub_fetch(&sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&mutex);
  }

 private:
  enum { NAP_NS = 500 * 1000 };
  // The phase in the upper half, how many of its items in the lower. A word of an earlier phase counts as none.
  struct alignas(64) Word {
    uint64_t value;
  };
  Word taken[MOST_RANGES], done;
  int32_t sleeping = 0;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t is_over = PTHREAD_COND_INITIALIZER;

  static uint32_t phase_of(uint64_t word) { return (uint32_t)(word >> 32); }
  static uint64_t both(uint32_t phase, int64_t count) { return (uint64_t)phase << 32 | (uint32_t)count; }

  bool over(uint32_t phase, int64_t count) {
    const uint64_t now = __atomic_load_n(&done.value, __ATOMIC_SEQ_CST);
    return phase_of(now) > phase || now == both(phase, count);
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
};

}  // namespace
