#include "blocks/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace smoe {
namespace {

constexpr float kTaken = -std::numeric_limits<float>::infinity();

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

size_t best_of(const float* p, size_t n) { return static_cast<size_t>(std::max_element(p, p + n) - p); }

// Takes the largest `k` of p[0, n) in order, best first.
void take_top(float* p, size_t n, size_t k, uint32_t* experts) {
  for (size_t j = 0; j < k; ++j) {
    const size_t best = best_of(p, n);
    experts[j] = static_cast<uint32_t>(best);
    p[best] = kTaken;
  }
}

float group_score(const float* p, size_t n, GroupScore rule) {
  const size_t best = best_of(p, n);
  if (rule == GroupScore::best) return p[best];
  float second = kTaken;
  for (size_t i = 0; i < n; ++i)
    if (i != best) second = std::max(second, p[i]);
  return p[best] + second;
}

// Marks the experts outside the best groups as taken.
void limit_groups(const FfnSpec& spec, float* p) {
  const size_t size = spec.experts / spec.groups;
  // The groups' scores are compared pairwise, so that nothing has to be held: a group stays while fewer than top_groups
  // are ahead of it, an earlier one of the same score included.
  for (size_t g = spec.groups; g-- > 0;) {
    const float mine = group_score(p + g * size, size, spec.group_score);
    size_t ahead = 0;
    for (size_t other = 0; other < spec.groups; ++other) {
      const float theirs = group_score(p + other * size, size, spec.group_score);
      if (other < g ? theirs >= mine : theirs > mine) ++ahead;
    }
    if (ahead >= spec.top_groups) std::fill_n(p + g * size, size, kTaken);
  }
}

// The best logit and the weight it gets: its softmax over the logits no further than 2 * jitter from it, relative to
// the larger of the two magnitudes.
void sparse_mix(const FfnSpec& spec, float* p, uint32_t* experts, float* weights) {
  const size_t E = spec.experts;
  for (size_t j = 0; j < spec.top_k; ++j) {
    const size_t best = best_of(p, E);
    const float top = p[best];
    float sum = 0;
    for (size_t i = 0; i < E; ++i) {
      if (p[i] == kTaken || (top - p[i]) / std::max(std::abs(p[i]), top) > 2 * spec.jitter) continue;
      sum += std::exp(p[i] - top);
    }
    experts[j] = static_cast<uint32_t>(best);
    weights[j] = 1.0f / sum;
    p[best] = kTaken;
  }
}

}  // namespace

void route(const Compute& c, const FfnSpec& spec, const RouterWeights& w, Activations& input, Workspace& ws) {
  const size_t E = spec.experts, K = spec.top_k;
  const bool apart = spec.correction || spec.groups > 1;
  linear(c, w.logits, input, ws.router);
  c.pool->run(input.rows(), [&](size_t t, size_t) {
    float *p = ws.router + t * E, *weights = ws.weights + t * K;
    uint32_t* chosen = ws.chosen + t * K;
    if (spec.scores == Scores::sparsemixer) return sparse_mix(spec, p, chosen, weights);
    float sum = 1;
    if (spec.scores == Scores::softmax) sum = c.kernels->exp_sum(p, E, c.kernels->max_value(p, E));
    // Without a correction the logits are in the same order, and do not saturate.
    if (spec.scores == Scores::sigmoid && apart && !spec.correct_logits)
      for (size_t i = 0; i < E; ++i) p[i] = sigmoid(p[i]);
    if (apart) {
      float* choice = ws.choice + t * E;
      for (size_t i = 0; i < E; ++i) choice[i] = p[i] / sum + (spec.correction ? w.correction[i] : 0.0f);
      if (spec.groups > 1) limit_groups(spec, choice);
      take_top(choice, E, K, chosen);
      for (size_t j = 0; j < K; ++j) weights[j] = spec.correct_logits ? sigmoid(p[chosen[j]]) : p[chosen[j]];
    } else {
      for (size_t j = 0; j < K; ++j) {
        chosen[j] = static_cast<uint32_t>(best_of(p, E));
        weights[j] = spec.scores == Scores::sigmoid ? sigmoid(p[chosen[j]]) : p[chosen[j]];
        p[chosen[j]] = kTaken;
      }
    }
    float total = 0;
    for (size_t j = 0; j < K; ++j) total += weights[j];
    const float divide = spec.normalize ? std::max(total, spec.norm_floor * sum) + spec.norm_added * sum : sum;
    for (size_t j = 0; j < K; ++j) weights[j] = weights[j] / divide * spec.scaling;
  });
}

}  // namespace smoe
