// Multi-head latent attention (DeepSeek-V2, 2024): what is cached is one latent of kv_rank values a position and one
// rotated key of rope_dim, for all heads. In the absorbed form, for prefill as for decode: a head's query is taken into
// the latent's space by k_up, attention runs over the cache as over one wide kv head whose keys are its values too, and
// v_up takes the result to the head's values. Families: DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash.
#pragma once

#include "blocks/attend.h"
#include "smoe/model.h"

namespace smoe {

struct LatentWeights {
  Linear q_a, q_b;                  // q_a is null where q is made directly: then q_b is [heads * (nope + rope), hidden]
  const float* q_a_norm = nullptr;  // [q_rank]
  Linear kv_a;                      // [kv_rank + rope_dim, hidden]
  const float* kv_a_norm = nullptr;  // [kv_rank]
  Matrix k_up;                       // [heads * kv_rank, nope_dim]
  Matrix v_up;                       // [heads * v_dim, kv_rank]
  Linear o;                          // [hidden, heads * v_dim]
};

// Rows whose queries are held in the latent's space at once: at 576 values a head they are the widest rows there are.
inline constexpr size_t kLatentRows = 32;

// As attention_gqa. A sequence's cache has one head of kv_rank + rope_dim, keys and values in the same memory.
void attention_mla(const Compute& c, const AttentionSpec& spec, const LatentWeights& w, Batch batch,
                   const RopeSpec& rope, Workspace& ws, Activations& input, size_t first);

}  // namespace smoe
