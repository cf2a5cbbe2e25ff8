// The gated delta rule (Yang et al. 2024): a head's state is a matrix that answers a key with a value. At each position
// it decays, what it answers the position's key with is moved towards the position's value by beta, and the query is
// answered. Queries, keys and values pass a short convolution before it, a norm and a gate follow. Families:
// Qwen3-Next, Qwen3.5; with a decay for each channel of the keys Kimi Linear (Moonshot 2025).
#pragma once

#include "blocks/recurrent.h"

namespace smoe {

struct DeltaWeights {
  Linear q, k, v;  // [keys, hidden] twice, [values, hidden]
  ConvWeights q_conv, k_conv, v_conv;
  Linear beta;                  // [heads, hidden]
  Linear decay_in, decay;       // decay_in is null where spec.rank is 0; decay [heads or keys, rank or hidden]
  const float* rate = nullptr;  // [heads], negative
  Linear gate_in, gate;         // likewise; gate [values, rank or hidden]
  const float* norm = nullptr;  // [value_dim]
  Linear out;                   // [hidden, values]
};

// As attention_gqa, with a state in place of the cache.
void delta(const Compute& c, const RecurrentSpec& spec, const DeltaWeights& w, Batch batch, Workspace& ws,
           Activations& input, size_t first);

}  // namespace smoe
