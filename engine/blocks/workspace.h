// Every buffer a forward pass writes, for a chunk of T rows. Laid out and allocated once by core/scratch.cpp, which is
// also what the memory plan counts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smoe {

inline constexpr size_t kKeyTile = 64;    // keys per attention tile, anchored at absolute positions
inline constexpr size_t kQueryTile = 16;  // queries that share a decoded key tile
inline constexpr size_t kHeadSlice = 16;  // heads of a group that do: of a wider group every slice decodes it again
inline constexpr size_t kHeadRows = 16;   // rows of logits held at once

struct Workspace {
  float* x = nullptr;          // [T, hidden] the residual stream
  float* normed = nullptr;     // [T, hidden]
  float* block_out = nullptr;  // [T, hidden] what a block adds to the stream
  float* q = nullptr;          // [T, heads * head_dim]
  float* k = nullptr;          // [T, kv_heads * head_dim]
  float* v = nullptr;          // [T, kv_heads * head_dim]
  float* attn = nullptr;       // [T, heads * head_dim]
  float* attn_gate = nullptr;  // [T, heads * head_dim] where a layer's attention is gated
  // Latent attention: q is [T, heads, nope_dim + rope_dim], k [T, kv_rank + rope_dim], attn [T, heads, v_dim].
  // Recurrent blocks: q is what is made of the input and convolved, or keys' queries, k keys, v values; attn the
  // result.
  float* recur_a = nullptr;     // [T, heads or keys] decay (delta); [T, rank + 2 * key_dim] (mamba)
  float* recur_b = nullptr;     // [T, heads] beta (delta); [T, values] time step (mamba)
  float* recur_rank = nullptr;  // [2, T, rank]
  float* q_latent = nullptr;    // [T, q_rank]
  float* nope_q = nullptr;      // [heads, kLatentRows, nope_dim]
  float* latent_q = nullptr;    // [kLatentRows, heads, kv_rank + rope_dim]
  float* latent_out = nullptr;  // [heads, kLatentRows, kv_rank]
  float* rope_cos = nullptr;    // [ropes, T, rope_half]
  float* rope_sin = nullptr;
  size_t rope_half = 0;  // row length of the two tables: the largest inv_freq size
  size_t rows = 0;       // T
  const float* cos_of(size_t rope, size_t t) const { return rope_cos + (rope * rows + t) * rope_half; }
  const float* sin_of(size_t rope, size_t t) const { return rope_sin + (rope * rows + t) * rope_half; }

  float* attn_worker = nullptr;  // [workers, attn_worker_floats]
  size_t attn_worker_floats = 0;
  float* attn_spans = nullptr;  // [attend_span_floats]

  uint8_t* acts_32 = nullptr;   // [T, act_row_bytes(q8_32, widest input)]
  uint8_t* acts_256 = nullptr;  // [T, act_row_bytes(q8_256, widest input)]

  // Feed-forward. pairs = T for a dense layer, T * top_k (token, expert) pairs for experts.
  float* gate = nullptr;             // [pairs, width]
  float* up = nullptr;               // [pairs, width]
  uint8_t* mid_32 = nullptr;         // [pairs, act_row_bytes(q8_32, width)]
  uint8_t* mid_256 = nullptr;        // [pairs, act_row_bytes(q8_256, width)]
  float* pair_out = nullptr;         // [pairs, hidden]
  float* router = nullptr;           // [T, experts]
  float* choice = nullptr;           // [T, experts] scores as the choice sees them, where they differ
  uint32_t* chosen = nullptr;        // [T, top_k] experts, best first
  float* weights = nullptr;          // [T, top_k]
  uint32_t* pair_of = nullptr;       // [T, top_k] where the pair lies in expert order
  uint32_t* pair_row = nullptr;      // [pairs] the row a pair belongs to
  float* pair_weight = nullptr;      // [pairs] the weight of each, where it multiplies what an expert reads
  uint32_t* expert_begin = nullptr;  // [experts + 1] first pair of each expert
  uint32_t* expert_order = nullptr;  // [experts] distinct experts in order of first use
  uint32_t* expert_uses = nullptr;   // [experts] rows that chose each of these

  // Guessed of the layer to come.
  uint32_t* ahead_chosen = nullptr;   // [T, top_k]
  float* ahead_weights = nullptr;     // [T, top_k]
  uint32_t* ahead_experts = nullptr;  // [experts] distinct ones
  uint32_t* ahead_uses = nullptr;     // [experts]

  float* logits = nullptr;  // [kHeadRows, vocab]
};

}  // namespace smoe
