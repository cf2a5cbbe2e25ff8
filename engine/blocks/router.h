// Exact routing: scores over all experts, the best k by score (and a learned correction, and limited to the best
// groups, where the model has them; a tie goes to the lower index), their weights optionally divided by their sum,
// times a scale. Families: Mixtral, Qwen2/3-MoE, OLMoE (softmax), DeepSeek-V3, GLM-4.5, dots1, MiniMax-M2 (sigmoid and
// correction), Phi-3.5-MoE (sparse mixer, Liu et al. 2024).
#pragma once

#include "blocks/linear.h"
#include "blocks/workspace.h"
#include "smoe/model.h"

namespace smoe {

struct RouterWeights {
  Linear logits;                      // [experts, hidden]
  const float* correction = nullptr;  // [experts]; null without
};

// Fills ws.chosen and ws.weights [input.rows(), top_k].
void route(const Compute& c, const FfnSpec& spec, const RouterWeights& w, Activations& input, Workspace& ws);

}  // namespace smoe
