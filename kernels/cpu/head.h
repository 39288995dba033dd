// From hidden states to logits, or to the best token of each row without ever writing the logits.
#pragma once

#include "elementwise.h"
#include "linear.h"

namespace {

struct Best {
  float value;
  int32_t is_nan;
  int64_t column;
};
constexpr Best NOTHING = {-INFINITY, 0, -1};

// All threads. `best` holds one of each row for each thread, NOTHING to begin with.
template <class T>
void head_in(const Model& model, const Step& step, Rows rows, Best* best, Team& team) {
  const int64_t S = step.num_rows, V = model.vocab;
  Best* own = best + team.id * S;
  multiply<T, 1>(rows, S, model.head, team, [&](int64_t row, int64_t column, const float* values) {
    alignas(64) float v[PANEL];
    vf top = splat(-INFINITY);
    vi nan{};
    for (int64_t j = 0; j < PANEL; j += W) {
      const int64_t left = V - column - j;
      vf l = load(values + j);
      if (model.head.bias && left > 0) l += load_some(model.head.bias + column + j, left);
      l *= model.logits_multiplier;
      if (model.logits_softcap != 0.f) l = model.logits_softcap * vtanh(l / model.logits_softcap);
      if (left < W)
        for (int64_t i = left > 0 ? left : 0; i < W; i++) l[i] = -INFINITY;
      nan |= l != l;
      top = vmax(l, top);
      store(v + j, l);
      if (step.logits && left > 0) store_some(step.logits + row * V + column + j, l, left);
    }
    if (step.logits) return;
    Best& b = own[row];
    b.is_nan |= any(nan);
    const float found = reduce_max(top);
    // a thread need not have its panels in order
    if (found > b.value || b.column < 0 || (found == b.value && column < b.column))
      for (int j = 0; j < PANEL; j++)
        if (v[j] == found) {
          b.value = found, b.column = column + j;
          break;
        }
  });
  if (step.logits) return;
  team.stretches(S, 16, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; s++) {
      Best all = best[s];
      for (int t = 1; t < team.size; t++) {
        const Best& other = best[t * S + s];
        all.is_nan |= other.is_nan;
        // of equal ones the first column, whichever thread has had it
        const bool better = other.value > all.value || (other.value == all.value && other.column < all.column);
        if (other.column >= 0 && (all.column < 0 || better)) all.value = other.value, all.column = other.column;
      }
      step.best[s] = all.is_nan ? -1 : all.column;
    }
  });
}

}  // namespace
