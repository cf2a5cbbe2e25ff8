// Gated feed-forward: down(activation(gate x) * up x). Dense layers, and the always-on expert of a mixture. Shazeer
// 2020 (SwiGLU).
#pragma once

#include "blocks/activation.h"
#include "blocks/linear.h"
#include "blocks/workspace.h"

namespace smoe {

struct FfnWeights {
  Linear gate, up, down;
};

// y [input.rows(), hidden] = the block's output. Uses ws.gate, ws.up and the mid buffers.
void ffn(const Compute& c, const FfnSpec& spec, const FfnWeights& w, Activations& input, Workspace& ws, float* y);

}  // namespace smoe
