// Grouped-query attention with rotary embedding: q, k, v projections (optional bias, clip, RMS norm over heads or over
// all), causal window, online softmax over key tiles anchored at absolute positions (so that a query's result does not
// depend on how the prompt was cut into chunks), output projection. Families: Llama, Mistral, Qwen2/3, Mixtral, OLMoE.
// Online softmax: Milakov & Gimelshein 2018, Dao et al. 2022.
#pragma once

#include "blocks/kv.h"
#include "blocks/linear.h"
#include "blocks/workspace.h"
#include "smoe/model.h"

namespace smoe {

struct AttentionWeights {
  Linear q, k, v, o;
  const float* q_norm = nullptr;  // [head_dim] or [heads * head_dim]; null without QkNorm
  const float* k_norm = nullptr;
};

// Reads ws.normed [T, hidden] through `input`, appends T keys and values at `position`, and writes the block's output
// for rows [first, T) to ws.block_out (row first at its start). first == T only fills the cache. half: values of a head
// that rotate, divided by two.
void attention_gqa(const Compute& c, const AttentionSpec& spec, const AttentionWeights& w, float norm_eps,
                   const KvLayer& kv, Workspace& ws, Activations& input, size_t half, uint64_t position, size_t first);

}  // namespace smoe
