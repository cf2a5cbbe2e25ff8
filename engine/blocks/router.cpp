#include "blocks/router.h"

namespace smoe {
namespace {

// Takes the largest `k` of p[0, n) in order; taken entries are marked with -1, which no probability is.
void take_top(float* p, size_t n, size_t k, uint32_t* experts, float* weights) {
  for (size_t j = 0; j < k; ++j) {
    size_t best = 0;
    for (size_t i = 1; i < n; ++i)
      if (p[i] > p[best]) best = i;
    experts[j] = static_cast<uint32_t>(best);
    weights[j] = p[best];
    p[best] = -1.0f;
  }
}

}  // namespace

void route(const Compute& c, const FfnSpec& spec, const Linear& router, Activations& input, Workspace& ws) {
  const size_t E = spec.experts, K = spec.top_k;
  linear(c, router, input, ws.router);
  c.pool->run(input.rows(), [&](size_t t, size_t) {
    float* p = ws.router + t * E;
    float* weights = ws.weights + t * K;
    const float sum = c.kernels->exp_sum(p, E, c.kernels->max_value(p, E));
    take_top(p, E, K, ws.chosen + t * K, weights);
    float total = 0;
    for (size_t j = 0; j < K; ++j) total += weights[j];
    const float divide = spec.normalize ? total : sum;
    for (size_t j = 0; j < K; ++j) weights[j] = weights[j] / divide * spec.scaling;
  });
}

}  // namespace smoe
