// Grouped-query attention with rotary embedding: q, k, v projections (optional bias, clip, RMS norm over heads or over
// all, before or after the rotation), attention over the cache, output projection. Families: Llama, Mistral, Qwen2/3,
// Mixtral, OLMoE, GLM-4.5, MiniMax-M2 and most others.
#pragma once

#include "blocks/attend.h"
#include "smoe/model.h"

namespace smoe {

struct AttentionWeights {
  Linear q, k, v, o;
  const float* q_norm = nullptr;  // [head_dim] or [heads * head_dim]; null without QkNorm
  const float* k_norm = nullptr;
  const float* sinks = nullptr;  // [heads]; null without
  Matrix gate;                   // [heads * head_dim, hidden]; no data without
};

// Reads a batch of T rows through `input`, appends their keys and values to their sequences' caches, and writes the
// block's output for rows [first, T) to ws.block_out (row first at its start). first == T only fills the caches.
void attention_gqa(const Compute& c, const AttentionSpec& spec, const AttentionWeights& w, float norm_eps, Batch batch,
                   const RopeSpec& rope, Workspace& ws, Activations& input, size_t first);

}  // namespace smoe
