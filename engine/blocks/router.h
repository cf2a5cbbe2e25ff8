// Softmax routing with top-k: probabilities over all experts, the k largest (a tie goes to the lower index), optionally
// divided by their sum, times a scale. Families: Mixtral (normalised), Qwen2/3-MoE, OLMoE.
#pragma once

#include "blocks/linear.h"
#include "blocks/workspace.h"
#include "smoe/model.h"

namespace smoe {

// Fills ws.chosen and ws.weights [input.rows(), top_k].
void route(const Compute& c, const FfnSpec& spec, const Linear& router, Activations& input, Workspace& ws);

}  // namespace smoe
