// Selective state spaces. Mamba (Gu & Dao 2023): every channel has a state of key_dim values, each decaying at a rate
// of its own, over a time step that the input chooses. Mamba-2 (Dao & Gu 2024): one rate a head, keys and queries
// shared by groups of heads. Families: Jamba; Granite 4.0-H and other hybrids.
#pragma once

#include "blocks/recurrent.h"

namespace smoe {

struct MambaWeights {
  Linear in;  // [2 * values, hidden]: what is convolved, and the gate
  ConvWeights conv;
  Linear x;                        // [rank + 2 * key_dim, values]: time step, key, query
  const float* dt_norm = nullptr;  // [rank]
  const float* k_norm = nullptr;   // [key_dim]
  const float* q_norm = nullptr;
  Linear dt;                    // [values, rank], with a bias
  const float* rate = nullptr;  // [key_dim, values], negative
  const float* skip = nullptr;  // [values]
  Linear out;                   // [hidden, values]
};

struct Mamba2Weights {
  Linear
      in;  // [values + channels + heads, hidden]: the gate, what is convolved (values, keys, queries), the time steps
  ConvWeights conv;
  const float* dt_bias = nullptr;  // [heads]
  const float* rate = nullptr;     // [heads], negative
  const float* skip = nullptr;     // [heads]
  const float* norm = nullptr;     // [values], over each group of heads
  Linear out;                      // [hidden, values]
};

// As attention_gqa, with a state in place of the cache.
void mamba(const Compute& c, const RecurrentSpec& spec, const MambaWeights& w, Batch batch, Workspace& ws,
           Activations& input, size_t first);
void mamba2(const Compute& c, const RecurrentSpec& spec, const Mamba2Weights& w, Batch batch, Workspace& ws,
            Activations& input, size_t first);

}  // namespace smoe
