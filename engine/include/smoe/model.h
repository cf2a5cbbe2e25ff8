// The whole model in one header: what a vault's manifest says, as numbers and block names. The engine knows no family.
// Shapes are [rows, cols] = [out, in]. Read from the manifest's "arch" and "tensors" (see vault/FORMAT.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "smoe/status.h"

namespace smoe {

// How the values of a matrix are stored. Values are exactly those of the ecosystem's own format of the same name.
enum class Encoding : uint8_t {
  f32,
  f16,
  bf16,
  q8_0,
  q4_0,
  q4_k,
  q6_k,
  q4_1,
  q5_0,
  q5_1,
  mxfp4,
  iq4_nl,
  q2_k,
  q3_k,
  q5_k,
  iq4_xs,
  mlx_first,  // MLX affine, named mlxBITS_gGROUP_SCALES: bits 2 3 4 5 6 8, groups of 32 64 128, scales in bf16 f16 f32,
  mlx_last = mlx_first + 6 * 3 * 3 - 1  // the last changing fastest
};

// How the blocks of a matrix are arranged. rows: row after row, as the ecosystem stores them (plain encodings always).
// panel16: sixteen rows side by side, so that one vector register holds one row per lane (quantised matrices).
enum class Layout : uint8_t { rows, panel16 };

struct TensorSpec {
  Encoding encoding = Encoding::f32;
  Layout layout = Layout::rows;
  uint64_t rows = 0, cols = 0;  // a vector is rows = 1
  uint32_t crc32c = 0;          // over the stored bytes
};

// Rotary embedding, resolved by convert: angle(pos, i) = pos * inv_freq[i]; cos and sin are multiplied by `scale`.
// Rotates the first 2 * inv_freq.size() values of a head, pairing value i with value i + inv_freq.size(), or where
// interleaved value 2i with value 2i + 1. Without frequencies nothing rotates. An engine whose window is longer than
// `long_from` positions (0 = never) uses long_inv_freq and long_scale instead, from the first position on.
struct RopeSpec {
  std::vector<float> inv_freq;
  float scale = 1.0f;
  bool interleaved = false;
  uint32_t long_from = 0;
  std::vector<float> long_inv_freq;
  float long_scale = 1.0f;
};

enum class NormKind : uint8_t { rms, layer };            // of the residual stream; layer: mean removed, with a bias
enum class NormPlace : uint8_t { before, after, both };  // of the norms around a layer's two blocks
// RMS norm of q and k: over each head, over all heads at once, or over each head without a weight.
enum class QkNorm : uint8_t { none, head, full, unit };
// What takes a layer's positions together. The recurrent ones have a state of one size in place of keys and values.
enum class AttentionBlock : uint8_t { gqa, mla, short_conv, delta, mamba2, mamba };

struct AttentionSpec {
  AttentionBlock block = AttentionBlock::gqa;
  // Of what is cached: "mla" holds one row [kv_rank + rope_dim] a position for all heads, its keys and values at once.
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;      // multiplies q.k, usually head_dim^-0.5
  uint32_t window = 0;  // positions a query sees, itself included; 0 = all
  uint32_t chunk = 0;   // a query sees only its own chunk of so many positions, up to itself; 0 = all
  // Queries are multiplied by 1 + temperature * log(1 + floor((position + 1) / temperature_floor)); 0 = off.
  float temperature = 0, temperature_floor = 1;
  QkNorm qk_norm = QkNorm::none;
  bool norm_after_rope = false;
  bool gated = false;  // the heads' outputs are multiplied by sigmoid(gate x), value by value
  bool sinks = false;  // each head has a learned logit that takes part in its softmax and has no value
  float qkv_clip = 0;  // q, k, v clamped to [-clip, clip]; 0 = off
  uint32_t rope = 0;   // index into ModelSpec::ropes
  // Block "mla": q through a latent of q_rank values (0 = directly), k and v through one of kv_rank.
  uint32_t q_rank = 0, kv_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
  float latent_eps = 0;  // of the latents' norms

  bool shares_values() const { return block == AttentionBlock::mla; }  // the cached keys are the values too
  bool is_recurrent() const { return block != AttentionBlock::gqa && block != AttentionBlock::mla; }
};

inline constexpr uint32_t kMaxTaps = 16, kMaxStateKeys = 1024;  // of a recurrent block

// Of a recurrent block. Each begins with a causal convolution of each of its channels over `taps` positions; all but
// short_conv then keep for each of `heads` a matrix [key_dim, value_dim], which `key_heads` keys and queries write and
// read, those of head h being number h * key_heads / heads, or h % key_heads where they are `tiled`.
//   short_conv  value_dim channels between two gates (LFM2)
//   delta       the gated delta rule (Yang et al. 2024), its decay a number a head, or a channel of the keys (Kimi)
//   mamba2      Dao & Gu 2024: heads of value_dim channels, key_dim the state's size, key_heads the groups
//   mamba       Gu & Dao 2023: one head of value_dim channels, each element of the state decaying by itself
struct RecurrentSpec {
  uint32_t taps = 0, heads = 0, key_heads = 0, key_dim = 0, value_dim = 0;
  uint32_t rank = 0;            // of the time step (mamba), or of decay and gate (delta; 0 = made directly)
  bool channel_decay = false;   // delta
  bool sigmoid_gate = false;    // delta: the gate behind its norm; else silu
  bool tiled = false;           // delta
  bool negative_rates = false;  // stored as -exp(A_log), as GGUF has them; else as A_log
  float eps = 0;                // of the block's own norms

  uint64_t key_head(uint64_t head) const { return tiled ? head % key_heads : head * key_heads / heads; }
  uint64_t keys() const { return uint64_t{key_heads} * key_dim; }
  uint64_t values() const { return uint64_t{heads} * value_dim; }
  uint64_t channels() const { return 2 * keys() + values(); }  // that are convolved
  uint64_t tail_floats() const { return (taps - 1) * channels(); }
  uint64_t state_floats() const { return values() * key_dim; }
};

struct ExpertEncodings {
  Encoding gate = Encoding::f32, up = Encoding::f32, down = Encoding::f32;
};

// What a router makes of its logits. sparsemixer: each choice is weighted by its softmax over the experts within
// `jitter` of it, as Phi-3.5-MoE does.
enum class Scores : uint8_t { softmax, sigmoid, sparsemixer };
enum class GroupScore : uint8_t { best, best_two };  // a group counts as its best expert, or as its best two together

// swiglu_clamped: min(gate, limit) * sigmoid(alpha * that) * (up within limit + 1).
// gelu_tanh: the usual approximation of GELU.
enum class Activation : uint8_t { silu, swiglu_clamped, gelu_tanh };

struct FfnSpec {       // block "ffn" (experts == 0) or "moe"
  uint32_t width = 0;  // dense width; 0 for moe
  uint32_t experts = 0, top_k = 0, expert_width = 0;
  Scores scores = Scores::softmax;
  bool correction = false;              // a learned bias is added to the scores for the choice, not for the weights
  bool correct_logits = false;          // to the logits instead; with sigmoid
  uint32_t groups = 1, top_groups = 1;  // experts are chosen from the best top_groups of equal groups only
  GroupScore group_score = GroupScore::best;
  float jitter = 0;           // of sparsemixer
  bool normalize = false;     // the chosen router weights are divided by their sum
  float norm_floor = 0;       // which counts as at least this
  float norm_added = 0;       // and this more
  float scaling = 1.0f;       // and then multiplied by this
  uint32_t shared_width = 0;  // width of the always-on expert, 0 = none
  bool shared_gate = false;   // its output is multiplied by sigmoid(shared_gate . x)
  Activation activation = Activation::silu;
  float alpha = 1, limit = 0;  // of swiglu_clamped
  bool scale_input = false;    // the router's weight multiplies what an expert reads, not what it gives
  bool expert_bias = false;    // each expert's three matrices have biases, in its record
  ExpertEncodings encodings;
  bool is_moe() const { return experts > 0; }
};

struct LayerSpec {
  AttentionSpec attention;  // of a recurrent block only its name
  RecurrentSpec recurrent;
  FfnSpec ffn;
  NormPlace norms = NormPlace::before;
};

struct GenerationDefaults {  // the vault's generation_config; negative = not given
  float temperature = -1, top_p = -1, repetition_penalty = -1;
  int top_k = -1;
};

struct ModelSpec {
  std::string id, family, model_type, quant;
  uint32_t hidden = 0, vocab = 0, max_positions = 0;
  float norm_eps = 0;
  NormKind norm = NormKind::rms;
  bool tied_head = false;
  float embed_scale = 1, residual_scale = 1, logit_scale = 1;  // of embeddings, of what a block adds, of logits
  std::vector<RopeSpec> ropes;
  std::vector<LayerSpec> layers;
  std::vector<int32_t> eos_ids;
  GenerationDefaults generation;
  std::map<std::string, TensorSpec> tensors;  // trunk tensors by canonical name

  uint32_t moe_layers() const;
  uint32_t max_top_k() const;
};

// Parses and validates a manifest. Every number is range-checked and every trunk tensor the blocks need must be listed
// with the right shape. Errors: Code::corrupt, naming the field.
Result<ModelSpec> parse_manifest(const std::string& json);

// Bytes of an expert's three matrices inside its record: gate [width, hidden], up, down [hidden, width], then, where
// its experts have them, their biases as float32, each at a 64-byte boundary; `length` is padded to kRecordAlignment.
struct RecordLayout {
  uint64_t gate = 0, up = 0, down = 0, end = 0, length = 0;
  uint64_t gate_bias = 0, up_bias = 0, down_bias = 0;  // 0 = none
};
inline constexpr uint64_t kRecordAlignment = 16 * 1024;
RecordLayout record_layout(const FfnSpec& ffn, uint32_t hidden);

const char* encoding_name(Encoding e);
bool parse_encoding(const std::string& name, Encoding* out);

}  // namespace smoe
