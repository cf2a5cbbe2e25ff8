// What follows from a ModelSpec alone: its trunk tensors, its record layout, its encodings' names.
#include <algorithm>

#include "quant/quant.h"
#include "smoe/model.h"
#include "vault/manifest.h"

namespace smoe {
namespace {

constexpr struct {
  Encoding encoding;
  const char* name;
} kNames[] = {
    {Encoding::f32, "f32"},   {Encoding::f16, "f16"},   {Encoding::bf16, "bf16"}, {Encoding::q8_0, "q8_0"},
    {Encoding::q4_0, "q4_0"}, {Encoding::q4_k, "q4_k"}, {Encoding::q6_k, "q6_k"},
};

void add_attention(const AttentionSpec& a, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  const uint64_t q = uint64_t{a.heads} * a.head_dim, kv = uint64_t{a.kv_heads} * a.head_dim;
  out->push_back({prefix + "q.weight", {q, hidden}});
  out->push_back({prefix + "k.weight", {kv, hidden}});
  out->push_back({prefix + "v.weight", {kv, hidden}});
  out->push_back({prefix + "o.weight", {hidden, q}});
  out->push_back({prefix + "q.bias", {q}, false});
  out->push_back({prefix + "k.bias", {kv}, false});
  out->push_back({prefix + "v.bias", {kv}, false});
  out->push_back({prefix + "o.bias", {hidden}, false});
  if (a.qk_norm == QkNorm::none) return;
  const bool head = a.qk_norm == QkNorm::head;
  out->push_back({prefix + "q_norm.weight", {head ? a.head_dim : q}});
  out->push_back({prefix + "k_norm.weight", {head ? a.head_dim : kv}});
}

void add_gated(uint64_t width, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  out->push_back({prefix + "gate.weight", {width, hidden}});
  out->push_back({prefix + "up.weight", {width, hidden}});
  out->push_back({prefix + "down.weight", {hidden, width}});
}

void add_ffn(const FfnSpec& f, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  if (!f.is_moe()) return add_gated(f.width, hidden, prefix + "ffn.", out);
  out->push_back({prefix + "router.weight", {f.experts, hidden}});
  if (f.shared_width > 0) add_gated(f.shared_width, hidden, prefix + "shared.", out);
  if (f.shared_gate) out->push_back({prefix + "shared_gate.weight", {1, hidden}});
}

uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

uint64_t matrix_bytes(Encoding e, uint64_t rows, uint64_t cols) {
  return stored_bytes(e, encoding_info(e).plain ? Layout::rows : Layout::panel16, rows, cols);
}

}  // namespace

std::vector<TrunkTensor> trunk_tensors(const ModelSpec& model) {
  const uint64_t hidden = model.hidden;
  std::vector<TrunkTensor> out;
  out.push_back({"embed.weight", {model.vocab, hidden}});
  out.push_back({"final_norm.weight", {hidden}});
  if (!model.tied_head) out.push_back({"head.weight", {model.vocab, hidden}});
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    out.push_back({prefix + "attn_norm.weight", {hidden}});
    out.push_back({prefix + "ffn_norm.weight", {hidden}});
    add_attention(model.layers[i].attention, hidden, prefix + "attn.", &out);
    add_ffn(model.layers[i].ffn, hidden, prefix, &out);
  }
  return out;
}

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (const uint64_t size : shape) {
    if (text.size() > 1) text += ',';
    text += std::to_string(size);
  }
  return text += ']';
}

uint32_t ModelSpec::moe_layers() const {
  return static_cast<uint32_t>(
      std::count_if(layers.begin(), layers.end(), [](const LayerSpec& layer) { return layer.ffn.is_moe(); }));
}

uint32_t ModelSpec::max_top_k() const {
  uint32_t most = 0;
  for (const LayerSpec& layer : layers) most = std::max(most, layer.ffn.top_k);
  return most;
}

RecordLayout record_layout(const FfnSpec& ffn, uint32_t hidden) {
  RecordLayout r;
  r.up = round_up(r.gate + matrix_bytes(ffn.encodings.gate, ffn.expert_width, hidden), 64);
  r.down = round_up(r.up + matrix_bytes(ffn.encodings.up, ffn.expert_width, hidden), 64);
  r.end = r.down + matrix_bytes(ffn.encodings.down, hidden, ffn.expert_width);
  r.length = round_up(r.end, kRecordAlignment);
  return r;
}

const char* encoding_name(Encoding e) {
  for (const auto& entry : kNames) {
    if (entry.encoding == e) return entry.name;
  }
  return "?";
}

bool parse_encoding(const std::string& name, Encoding* out) {
  for (const auto& entry : kNames) {
    if (name != entry.name) continue;
    *out = entry.encoding;
    return true;
  }
  return false;
}

}  // namespace smoe
