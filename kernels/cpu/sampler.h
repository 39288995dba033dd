// Tokens from logits, as `generate` samples them: temperature, top-k, top-p, min-p, then one uniform number picks.
// Nothing is sorted: the score at which a filter cuts is selected, and what lies below it falls away.
// Penalties change a few scores where they lie, which costs nothing for the rest of the row, and are taken back.
#pragma once

#include "selection.h"

namespace {

constexpr int64_t GROUP = 16 * W;  // scores whose maxima are kept, lane by lane
constexpr float LEAST = -3.4028234663852886e38f;

// A row whose scores are changed for as long as this lives. The last change is the first to be taken back, so that a
// token may be changed several times.
class Penalised {
 public:
  static int64_t scratch_bytes(const Draw& draw) { return 8 * (draw.num_repeated + draw.num_banned + draw.num_added); }

  Penalised(float* row, int64_t vocab, const Draw& draw, void* scratch) : x(row) {
    before = (float*)scratch, token = (int32_t*)(before + scratch_bytes(draw) / 8);
    const auto change = [&](const int32_t* tokens, int64_t number, auto to) {
      for (int64_t i = 0; i < number; i++) {
        const int32_t t = tokens[i];
        if (t < 0 || t >= vocab) continue;
        token[count] = t, before[count++] = x[t];
        x[t] = to(x[t], i);
      }
    };
    const float penalty = draw.repetition;
    change(draw.repeated, draw.num_repeated, [&](float s, int64_t) { return s < 0 ? s * penalty : s / penalty; });
    change(draw.banned, draw.num_banned, [&](float, int64_t) { return -INFINITY; });
    change(draw.added, draw.num_added, [&](float s, int64_t i) { return s + draw.amounts[i]; });
  }
  ~Penalised() {
    while (count--) x[token[count]] = before[count];
  }

 private:
  float *x, *before;
  int32_t* token;
  int64_t count = 0;
};

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
    highest = top;
    top /= temperature;
    draw.token = NO_TOKEN;
    if (!(top - top == 0.f)) return;  // infinite, either way
    draw.kept = vocab;
    if (draw.top_p >= 1 && !(draw.min_p > 0) && !(draw.top_k > 0 && draw.top_k < vocab)) return pick_of_all(draw);
    filter(draw);
    draw.kept = count;
    pick(draw);
  }

 private:
  const float* x;
  int64_t vocab, groups = 0, count = 0;
  float *maxima, *active, *score;  // of groups; to be destroyed; of candidates, in order of their tokens
  int32_t* token;
  float top = -INFINITY, highest = 0, temperature = 1.f;  // the largest score, after and before the temperature

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
    const float limit = (float)(1 - draw.top_p);
    float bound = nucleus ? LEAST : floor;
    const bool whole = nucleus && !k && limit > 1e-4f;  // where the mass of all is known well enough
    const double all = whole ? weigh_groups() : 0;
    if (whole) bound = (float)(top + log(limit * all / vocab) - 1e-3);  // what is less would be spare in any case
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
    keep_nucleus(limit, whole ? all : ByWeight{top}.mass(score, count));
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
  // `all`: the mass of the whole, of which candidates may be missing that would be the first to fall.
  void keep_nucleus(float limit, double all) {
    const ByWeight weigh{top};
    const auto spare = [&](double mass) { return (float)(mass / all) <= limit; };
    // all of these together would be spare, if only just
    const float low = (float)(top + log(limit * all / vocab) - 1e-3);
    int64_t undecided = 0;
    for (int64_t i = 0; i < count; i += W) {
      const vf s = load_end(score + i, count - i, -INFINITY);
      undecided += put_kept(s >= low, s, active + undecided);
    }
    const double rest = all - weigh.mass(active, undecided), below = rest > 0 ? rest : 0;
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

  // Masses of groups, relative to the largest score, and of all; good to 1e-6 of that.
  double weigh_groups() {
    double* masses = (double*)active;
    const float inverse = 1 / temperature < -LEAST ? 1 / temperature : -LEAST, least_of_all = highest - 30 * temperature;
    double all = 0;
    for (int64_t g = 0; g < groups; g++) {
      masses[g] = 0;
      if (!any(load(maxima + g * W) > least_of_all)) continue;
      vf sum{};
      for (int64_t i = g * GROUP, end = least(i + GROUP, vocab); i < end; i += W)
        sum += vexp((load_end(x + i, vocab - i, -INFINITY) - highest) * inverse);
      all += masses[g] = reduce_add(sum);
    }
    return all;
  }

  // The first candidate at which the cumulated probability passes the uniform number.
  void pick(Draw& draw) {
    const ByWeight weigh{top};
    double* masses = (double*)active;
    double all = 0, passed = 0;
    for (int64_t i = 0; i < count; i += GROUP)
      all += masses[i / GROUP] = weigh.mass(score + i, least(GROUP, count - i));
    const double target = draw.uniform * all;
    int64_t i = 0;
    for (; i + GROUP < count && passed + masses[i / GROUP] <= target; i += GROUP) passed += masses[i / GROUP];
    walk(draw, i, least(i + GROUP, count), passed, target, all);
  }

  // The same where no filter is, so that all tokens are candidates: only one group of them is looked at closely.
  void pick_of_all(Draw& draw) {
    const double all = weigh_groups(), target = draw.uniform * all, *masses = (double*)active;
    double passed = 0;
    int64_t group = 0;
    for (int64_t g = 0; g < groups && passed <= target; g++)
      if (masses[g] > 0) group = g, passed += masses[g];
    passed -= masses[group];
    for (int64_t i = group * GROUP, end = least(i + GROUP, vocab); i < end; i++)
      token[count] = (int32_t)i, score[count++] = x[i] / temperature;
    walk(draw, 0, count, passed, target, all);
  }

  void walk(Draw& draw, int64_t i, int64_t end, double passed, double target, double all) {
    int64_t chosen = i;
    for (; i < end && passed <= target; i += W) {
      double weights[W];
      vd halves[2];
      ByWeight{top}.each(load_end(score + i, end - i, -INFINITY), &halves[0], &halves[1]);
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

int32_t sample_rows(Workspace& ws, float* logits, int64_t row_stride, int64_t vocab, Draw* draws, int64_t count,
                    int32_t threads) {
  if (!count) return OK;
  threads = (int32_t)least(threads, count);
  int64_t extra = 0;
  for (int64_t i = 0; i < count; i++) extra = most(extra, Penalised::scratch_bytes(draws[i]));
  const int64_t own = RowSampler::scratch_bytes(vocab), bytes = own + up(extra, 64);
  char* scratch = (char*)ws.buffers[Workspace::SCRATCH].need(bytes * threads);
  if (!scratch) return NO_MEMORY;
  in_parallel(threads, [&](Team& team) {
    team.each(count, [&](int64_t i, int64_t) {
      float* row = logits + draws[i].row * row_stride;
      char* mine = scratch + team.id * bytes;
      const Penalised penalised(row, vocab, draws[i], mine + own);
      RowSampler(row, vocab, mine).run(draws[i]);
    });
  });
  return OK;
}

}  // namespace
