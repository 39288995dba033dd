// Tokens from logits, as `generate` samples them: temperature, top-k, top-p, min-p, then one uniform number picks.
// Nothing is sorted: the score at which a filter cuts is selected, and what lies below it falls away.
#pragma once

#include "selection.h"

namespace {

constexpr int64_t GROUP = 16 * W;  // scores whose maxima are kept, lane by lane
constexpr float LEAST = -3.4028234663852886e38f;

// One row. Everything is computed from it alone and in one order, so that no other row changes its token.
class RowSampler {
 public:
  static int64_t scratch_bytes(int64_t vocab) { return 4 * 4 * (up(vocab, GROUP) + GROUP); }

  RowSampler(const float* logits, int64_t vocab, void* scratch) : x(logits), vocab(vocab) {
    const int64_t size = up(vocab, GROUP) + GROUP;
    maxima = (float*)scratch, active = maxima + size, score = active + size, token = (int32_t*)(score + size);
  }

  void run(Draw& draw) {
    draw.token = NOT_A_NUMBER;
    if (!survey()) return;
    if (draw.greedy) return best(draw);
    temperature = draw.temperature;
    top /= temperature;
    draw.token = NO_TOKEN;
    if (!(top - top == 0.f)) return;  // infinite, either way
    filter(draw);
    draw.kept = count;
    pick(draw);
  }

 private:
  const float* x;
  int64_t vocab, groups = 0, count = 0;
  float *maxima, *active, *score;  // of groups; to be destroyed; of candidates, in order of their tokens
  int32_t* token;
  float top = -INFINITY, temperature = 1.f;

  // Maxima of groups and of all; false if one is NaN.
  bool survey() {
    vf most = splat(-INFINITY);
    vi nan{};
    for (int64_t from = 0; from < vocab; from += GROUP, groups++) {
      vf m = splat(-INFINITY);
      const int64_t end = least(from + GROUP, vocab);
      for (int64_t i = from; i < end; i += W) {
        const vf v = load_end(x + i, vocab - i, -INFINITY);
        nan |= v != v;
        m = vmax(v, m);
      }
      store(maxima + groups * W, m);
      most = vmax(m, most);
    }
    top = reduce_max(most);
    return !any(nan);
  }

  void best(Draw& draw) const {
    int64_t group = 0;
    while (!any(load(maxima + group * W) == top)) group++;
    draw.token = group * GROUP;
    while (x[draw.token] != top) draw.token++;
    if (draw.logprobs) draw.logprob = -log(ByWeight{top}.mass(x, vocab));
  }

  void filter(const Draw& draw) {
    const int64_t k = draw.top_k > 0 && draw.top_k < vocab ? draw.top_k : 0, lanes = groups * W;
    const float floor = draw.min_p > 0 ? (float)(top + log(draw.min_p)) : LEAST;
    const bool nucleus = draw.top_p < 1;
    float bound = nucleus ? LEAST : floor;
    if (k && k <= lanes) {  // as many scores are at least the k-th largest of the maxima
      memcpy(active, maxima, lanes * sizeof(float));
      const float kth = threshold_of(active, lanes, 0, ByCount{}, [&](double n) { return n <= lanes - k; }).value;
      if (kth / temperature > bound) bound = kth / temperature;
    }
    gather(bound);
    if (k && count > k) {
      const int64_t spare = count - k;
      memcpy(active, score, count * sizeof(float));
      keep_from(threshold_of(active, count, 0, ByCount{}, [&](double n) { return n <= spare; }).value);
    }
    if (!nucleus) return;
    keep_nucleus(draw.top_p);
    keep_from(floor);
  }

  void gather(float bound) {
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    for (int64_t g = 0; g < groups; g++) {
      if (!any(load(maxima + g * W) / temperature >= bound)) continue;
      const int64_t end = least((g + 1) * GROUP, vocab);
      for (int64_t i = g * GROUP; i < end; i += W) {
        const vf s = load_end(x + i, vocab - i, -INFINITY) / temperature;
        const vi keep = s >= bound;
        put_kept(keep, lane + (int32_t)i, token + count);
        count += put_kept(keep, s, score + count);
      }
    }
  }

  void keep_from(float bound) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += W) {
      const vf s = load_end(score + i, count - i, -INFINITY);
      const vi keep = s >= bound;
      put_kept(keep, load_as<vi>(token + i), token + kept);
      kept += put_kept(keep, s, score + kept);
    }
    count = kept;
  }

  // From the least probable on, tokens fall while their probabilities add up to no more than 1 - top_p, which is
  // compared in float as `generate` does. Of equal ones the first fall first (its sort leaves that open), and the last
  // one of all stays.
  void keep_nucleus(double top_p) {
    const ByWeight weigh{top};
    const double all = weigh.mass(score, count);
    const float limit = (float)(1 - top_p);
    const auto spare = [&](double mass) { return (float)(mass / all) <= limit; };
    // all of these together would be spare, if only just
    const float low = (float)(top + log(limit * all / count) - 1e-3);
    int64_t undecided = 0;
    for (int64_t i = 0; i < count; i += W) {
      const vf s = load_end(score + i, count - i, -INFINITY);
      undecided += put_kept(s >= low, s, active + undecided);
    }
    const double below = undecided < count ? all - weigh.mass(active, undecided) : 0;
    Threshold cut = threshold_of(active, undecided, below, weigh, spare);
    int64_t fall = 0;
    if (cut.value == INFINITY) {
      cut.value = top, fall = -1;
      for (int64_t i = 0; i < count; i++) fall += score[i] == top;
    } else {
      const double each = weigh.of(cut.value);
      for (int64_t end = cut.equal; end - fall > 1;) {  // all of them would be too many
        const int64_t half = (fall + end) / 2;
        (spare(cut.below + half * each) ? fall : end) = half;
      }
    }
    for (int64_t i = 0; fall; i++)
      if (score[i] == cut.value) score[i] = -INFINITY, fall--;
    keep_from(cut.value);
  }

  // The first candidate at which the cumulated probability passes the uniform number.
  void pick(Draw& draw) {
    const ByWeight weigh{top};
    double* masses = (double*)active;
    double all = 0, passed = 0;
    for (int64_t i = 0; i < count; i += GROUP)
      all += masses[i / GROUP] = weigh.mass(score + i, least(GROUP, count - i));
    const double target = draw.uniform * all;
    int64_t i = 0, chosen = 0;
    for (; i + GROUP < count && passed + masses[i / GROUP] <= target; i += GROUP) passed += masses[i / GROUP];
    for (const int64_t end = least(i + GROUP, count); i < end && passed <= target; i += W) {
      double weights[W];
      vd halves[2];
      weigh.each(load_end(score + i, end - i, -INFINITY), &halves[0], &halves[1]);
      memcpy(weights, halves, sizeof(weights));
      for (int j = 0; j < W && passed <= target; j++) {
        passed += weights[j];
        if (weights[j] > 0) chosen = i + j;  // the last one, should rounding leave the target out of reach
      }
    }
    draw.token = token[chosen];
    draw.logprob = (double)score[chosen] - top - log(all);
  }
};

int32_t sample_rows(Workspace& ws, const float* logits, int64_t row_stride, int64_t vocab, Draw* draws, int64_t count,
                    int32_t threads) {
  if (!count) return OK;
  threads = (int32_t)least(threads, count);
  const int64_t bytes = RowSampler::scratch_bytes(vocab);
  char* scratch = (char*)ws.buffers[Workspace::SCRATCH].need(bytes * threads);
  if (!scratch) return NO_MEMORY;
  in_parallel(threads, [&](Team& team) {
    team.each(count, [&](int64_t i, int64_t) {
      RowSampler(logits + draws[i].row * row_stride, vocab, scratch + team.id * bytes).run(draws[i]);
    });
  });
  return OK;
}

}  // namespace
