#include "blocks/ahead.h"

#include <numeric>

namespace smoe {
namespace {

// Of E experts, choices made evenly leave E * exp(-choices / E) unused: from here on less than a tenth.
bool uses_nearly_all(const FfnSpec& spec, size_t rows) { return rows * spec.top_k * 2 >= size_t{spec.experts} * 5; }

// The coming layer's choice, were it made now, into ws.ahead_experts, best first. False if its router cannot be asked.
bool guess(const Compute& c, const Ahead& ahead, Workspace& ws) {
  const Matrix& w = ahead.router->logits.weight;
  if (c.format(w) != ActFormat::none) return false;  // the buffers of quantised activations hold this layer's input
  const float* x = ahead.x;
  if (ahead.norm->weight != nullptr) {
    normalize_row(c, ahead.norm_kind, *ahead.norm, x, w.cols, ahead.norm_eps, ws.ahead_normed);
    x = ws.ahead_normed;
  }
  Workspace aside = ws;  // this layer's choice stays where it is
  aside.chosen = ws.ahead_experts;
  aside.weights = ws.ahead_weights;
  Activations input(nullptr, nullptr);
  input.bind(x, 1, w.cols);
  route(c, *ahead.spec, *ahead.router, input, aside);
  return true;
}

}  // namespace

void read_ahead(const Compute& c, const Ahead& ahead, ExpertCache& cache, Workspace& ws) {
  const FfnSpec& spec = *ahead.spec;
  if (uses_nearly_all(spec, ahead.rows)) {
    std::iota(ws.ahead_experts, ws.ahead_experts + spec.experts, 0u);
    cache.prefetch(ahead.moe_layer, ws.ahead_experts, spec.experts, UINT32_MAX);
  } else if (ahead.rows == 1 && ahead.most > 0 && guess(c, ahead, ws)) {
    cache.prefetch(ahead.moe_layer, ws.ahead_experts, spec.top_k, ahead.most);
  }
}

}  // namespace smoe
