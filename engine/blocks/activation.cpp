#include "blocks/activation.h"

#include <algorithm>
#include <cmath>

namespace smoe {

void activate(const Compute& c, const FfnSpec& spec, float* gate, float* up, size_t n) {
  if (spec.activation == Activation::gelu_tanh) {
    // x (1 + tanh z) / 2 = x / (1 + e^-2z)
    for (size_t i = 0; i < n; ++i) {
      const float x = gate[i], twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
      gate[i] = x / (1.0f + std::exp(-twice)) * up[i];
    }
    return;
  }
  if (spec.activation == Activation::swiglu_clamped) {
    // silu(alpha g) * (u + 1) / alpha, so that the kernel does the exponentials.
    const float inverse = 1.0f / spec.alpha;
    for (size_t i = 0; i < n; ++i) {
      gate[i] = std::min(gate[i], spec.limit) * spec.alpha;
      up[i] = (std::clamp(up[i], -spec.limit, spec.limit) + 1.0f) * inverse;
    }
  }
  c.kernels->silu_mul(gate, up, n);
}

}  // namespace smoe
