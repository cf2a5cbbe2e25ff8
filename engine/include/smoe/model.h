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
enum class Encoding : uint8_t { f32, f16, bf16, q8_0, q4_0, q4_k, q6_k };

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
// Rotates the first 2 * inv_freq.size() values of a head, pairing value i with value i + inv_freq.size().
struct RopeSpec {
  std::vector<float> inv_freq;
  float scale = 1.0f;
};

enum class QkNorm : uint8_t { none, head, full };  // RMS norm of q and k: over each head, or over all heads at once

struct AttentionSpec {  // block "gqa"
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;      // multiplies q.k, usually head_dim^-0.5
  uint32_t window = 0;  // positions a query sees, itself included; 0 = all
  QkNorm qk_norm = QkNorm::none;
  float qkv_clip = 0;  // q, k, v clamped to [-clip, clip]; 0 = off
  uint32_t rope = 0;   // index into ModelSpec::ropes
};

struct ExpertEncodings {
  Encoding gate = Encoding::f32, up = Encoding::f32, down = Encoding::f32;
};

struct FfnSpec {       // block "ffn" (experts == 0) or "moe"
  uint32_t width = 0;  // dense width; 0 for moe
  uint32_t experts = 0, top_k = 0, expert_width = 0;
  bool normalize = false;     // the chosen router weights are divided by their sum
  float scaling = 1.0f;       // and then multiplied by this
  uint32_t shared_width = 0;  // width of the always-on expert, 0 = none
  bool shared_gate = false;   // its output is multiplied by sigmoid(shared_gate . x)
  ExpertEncodings encodings;
  bool is_moe() const { return experts > 0; }
};

struct LayerSpec {
  AttentionSpec attention;
  FfnSpec ffn;
};

struct GenerationDefaults {  // the vault's generation_config; negative = not given
  float temperature = -1, top_p = -1, repetition_penalty = -1;
  int top_k = -1;
};

struct ModelSpec {
  std::string id, family, model_type, quant;
  uint32_t hidden = 0, vocab = 0, max_positions = 0;
  float norm_eps = 0;
  bool tied_head = false;
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

// Bytes of an expert's three matrices inside its record: gate [width, hidden], up, down [hidden, width], each at a
// 64-byte boundary; `length` is padded to kRecordAlignment.
struct RecordLayout {
  uint64_t gate = 0, up = 0, down = 0, end = 0, length = 0;
};
inline constexpr uint64_t kRecordAlignment = 16 * 1024;
RecordLayout record_layout(const FfnSpec& ffn, uint32_t hidden);

const char* encoding_name(Encoding e);
bool parse_encoding(const std::string& name, Encoding* out);

}  // namespace smoe
