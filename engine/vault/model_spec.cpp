// What follows from a ModelSpec alone: its trunk tensors, its record layout, its encodings' names.
#include <algorithm>

#include "quant/quant.h"
#include "smoe/model.h"
#include "vault/manifest.h"

namespace smoe {
namespace {

// A matrix and the bias that its family may have.
void add_linear(const std::string& name, uint64_t rows, uint64_t cols, std::vector<TrunkTensor>* out) {
  out->push_back({name + ".weight", {rows, cols}});
  out->push_back({name + ".bias", {rows}, false});
}

void add_norm(const ModelSpec& model, const std::string& name, std::vector<TrunkTensor>* out) {
  out->push_back({name + ".weight", {model.hidden}});
  if (model.norm == NormKind::layer) out->push_back({name + ".bias", {model.hidden}});
}

void add_gqa(const AttentionSpec& a, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  const uint64_t q = uint64_t{a.heads} * a.head_dim, kv = uint64_t{a.kv_heads} * a.head_dim;
  add_linear(prefix + "q", q, hidden, out);
  add_linear(prefix + "k", kv, hidden, out);
  add_linear(prefix + "v", kv, hidden, out);
  add_linear(prefix + "o", hidden, q, out);
  if (a.gated) out->push_back({prefix + "gate.weight", {q, hidden}});
  if (a.sinks) out->push_back({prefix + "sinks", {a.heads}});
  if (a.qk_norm == QkNorm::none || a.qk_norm == QkNorm::unit) return;
  const bool head = a.qk_norm == QkNorm::head;
  out->push_back({prefix + "q_norm.weight", {head ? a.head_dim : q}});
  out->push_back({prefix + "k_norm.weight", {head ? a.head_dim : kv}});
}

// k_up and v_up are what the checkpoints hold as one matrix, per head k_up transposed: the latent is multiplied by
// neither; k_up takes the queries to it, and v_up takes what was read from it back.
void add_mla(const AttentionSpec& a, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  const uint64_t H = a.heads, q = H * (a.nope_dim + a.rope_dim);
  if (a.q_rank > 0) {
    add_linear(prefix + "q_a", a.q_rank, hidden, out);
    out->push_back({prefix + "q_a_norm.weight", {a.q_rank}});
    out->push_back({prefix + "q_b.weight", {q, a.q_rank}});
  } else {
    out->push_back({prefix + "q.weight", {q, hidden}});
  }
  add_linear(prefix + "kv_a", a.kv_rank + a.rope_dim, hidden, out);
  out->push_back({prefix + "kv_a_norm.weight", {a.kv_rank}});
  out->push_back({prefix + "k_up.weight", {H * a.kv_rank, a.nope_dim}});
  out->push_back({prefix + "v_up.weight", {H * a.v_dim, a.kv_rank}});
  add_linear(prefix + "o", hidden, H * a.v_dim, out);
}

void add_conv(const std::string& name, const RecurrentSpec& r, uint64_t channels, std::vector<TrunkTensor>* out) {
  out->push_back({name + ".weight", {r.taps, channels}, true, true});
  out->push_back({name + ".bias", {channels}, false});
}

void add_delta(const RecurrentSpec& r, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  const uint64_t keys = r.keys(), values = r.values(), from = r.rank > 0 ? r.rank : hidden;
  add_linear(prefix + "q", keys, hidden, out);
  add_linear(prefix + "k", keys, hidden, out);
  add_linear(prefix + "v", values, hidden, out);
  add_conv(prefix + "q_conv", r, keys, out);
  add_conv(prefix + "k_conv", r, keys, out);
  add_conv(prefix + "v_conv", r, values, out);
  add_linear(prefix + "beta", r.heads, hidden, out);
  if (r.rank > 0) {
    out->push_back({prefix + "decay_in.weight", {r.rank, hidden}});
    out->push_back({prefix + "gate_in.weight", {r.rank, hidden}});
  }
  add_linear(prefix + "decay", r.channel_decay ? keys : r.heads, from, out);
  add_linear(prefix + "gate", values, from, out);
  out->push_back({prefix + "rate", {r.heads}});
  out->push_back({prefix + "norm.weight", {r.value_dim}});
}

void add_mamba(const RecurrentSpec& r, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  const uint64_t n = r.values();
  add_linear(prefix + "in", 2 * n, hidden, out);
  add_conv(prefix + "conv", r, n, out);
  add_linear(prefix + "x", r.rank + 2 * r.key_dim, n, out);
  add_linear(prefix + "dt", n, r.rank, out);
  out->push_back({prefix + "dt_norm.weight", {r.rank}});
  out->push_back({prefix + "k_norm.weight", {r.key_dim}});
  out->push_back({prefix + "q_norm.weight", {r.key_dim}});
  out->push_back({prefix + "rate", {r.key_dim, n}, true, true});
  out->push_back({prefix + "skip", {n}});
}

void add_mamba2(const RecurrentSpec& r, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  add_linear(prefix + "in", r.values() + r.channels() + r.heads, hidden, out);
  add_conv(prefix + "conv", r, r.channels(), out);
  for (const char* name : {"dt.bias", "rate", "skip"}) out->push_back({prefix + name, {r.heads}});
  out->push_back({prefix + "norm.weight", {r.values()}});
}

void add_recurrent(const LayerSpec& layer, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  const RecurrentSpec& r = layer.recurrent;
  if (layer.attention.block == AttentionBlock::short_conv) {
    add_linear(prefix + "in", 3 * r.channels(), hidden, out);
    add_conv(prefix + "conv", r, r.channels(), out);
  }
  if (layer.attention.block == AttentionBlock::delta) add_delta(r, hidden, prefix, out);
  if (layer.attention.block == AttentionBlock::mamba) add_mamba(r, hidden, prefix, out);
  if (layer.attention.block == AttentionBlock::mamba2) add_mamba2(r, hidden, prefix, out);
  add_linear(prefix + "out", hidden, r.values(), out);
}

void add_mixer(const LayerSpec& layer, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  const AttentionSpec& a = layer.attention;
  if (a.is_recurrent()) return add_recurrent(layer, hidden, prefix + "recur.", out);
  a.block == AttentionBlock::mla ? add_mla(a, hidden, prefix + "attn.", out)
                                 : add_gqa(a, hidden, prefix + "attn.", out);
}

void add_gated(uint64_t width, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  add_linear(prefix + "gate", width, hidden, out);
  add_linear(prefix + "up", width, hidden, out);
  add_linear(prefix + "down", hidden, width, out);
}

void add_ffn(const FfnSpec& f, uint64_t hidden, const std::string& prefix, std::vector<TrunkTensor>* out) {
  if (!f.is_moe()) return add_gated(f.width, hidden, prefix + "ffn.", out);
  add_linear(prefix + "router", f.experts, hidden, out);
  if (f.correction) out->push_back({prefix + "router.correction", {f.experts}});
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
  add_norm(model, "final_norm", &out);
  if (!model.tied_head) out.push_back({"head.weight", {model.vocab, hidden}});
  out.push_back({"head.bias", {model.vocab}, false});
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerSpec& layer = model.layers[i];
    const std::string prefix = "layers." + std::to_string(i) + ".";
    if (layer.norms != NormPlace::after) {
      add_norm(model, prefix + "attn_norm", &out);
      add_norm(model, prefix + "ffn_norm", &out);
    }
    if (layer.norms != NormPlace::before) {
      add_norm(model, prefix + "attn_post_norm", &out);
      add_norm(model, prefix + "ffn_post_norm", &out);
    }
    add_mixer(layer, hidden, prefix, &out);
    add_ffn(layer.ffn, hidden, prefix, &out);
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
  if (ffn.expert_bias) {
    r.gate_bias = round_up(r.end, 64);
    r.up_bias = round_up(r.gate_bias + ffn.expert_width * sizeof(float), 64);
    r.down_bias = round_up(r.up_bias + ffn.expert_width * sizeof(float), 64);
    r.end = r.down_bias + hidden * sizeof(float);
  }
  r.length = round_up(r.end, kRecordAlignment);
  return r;
}

const char* encoding_name(Encoding e) { return encoding_info(e).name; }

bool parse_encoding(const std::string& name, Encoding* out) {
  for (const Encoding e : all_encodings()) {
    if (name != encoding_info(e).name) continue;
    *out = e;
    return true;
  }
  return false;
}

}  // namespace smoe
