// What stands between the matrices of a feed-forward block: gate = activation(gate) * up. SwiGLU (Shazeer 2020), or the
// clamped form of gpt-oss: gate and up are limited, gate * sigmoid(alpha * gate) * (up + 1).
#pragma once

#include "blocks/linear.h"
#include "smoe/model.h"

namespace smoe {

// gate and up: n values each; both are overwritten, the result is in gate.
void activate(const Compute& c, const FfnSpec& spec, float* gate, float* up, size_t n);

}  // namespace smoe
