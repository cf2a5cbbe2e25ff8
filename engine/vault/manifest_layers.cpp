// Keys that are written only where they differ from the default are optional here, so that the vaults of earlier
// versions stay readable; everything else is required, and unknown keys are refused.
#include "vault/manifest_layers.h"

#include <limits>

#include "quant/quant.h"
#include "vault/limits.h"

namespace smoe {
namespace {

Status unknown_value(const Fields& fields, std::string_view key, const std::string& got) {
  return Status(Code::corrupt, fields.name(key) + " is " + json_quote(got) + ", which this version does not know",
                "update smoe, or convert the model again with this version");
}

template <class E>
struct Name {
  const char* text;
  E value;
};

// An enumeration by name; with `optional` its default stays where the key is absent.
template <class E, size_t N>
Status read_name(const Fields& fields, std::string_view key, const Name<E> (&names)[N], E* out, bool optional = true) {
  if (optional && !fields.has(key)) return Status::ok();
  std::string got;
  SMOE_TRY(fields.string(key, &got));
  for (const auto& name : names) {
    if (got != name.text) continue;
    *out = name.value;
    return Status::ok();
  }
  return unknown_value(fields, key, got);
}

Status optional_u32(const Fields& fields, std::string_view key, uint32_t low, uint32_t high, uint32_t* out) {
  return fields.has(key) ? fields.u32(key, low, high, out) : Status::ok();
}
Status optional_f32(const Fields& fields, std::string_view key, float low, float high, float* out) {
  return fields.has(key) ? fields.f32(key, low, high, out) : Status::ok();
}
Status optional_bool(const Fields& fields, std::string_view key, bool* out) {
  return fields.has(key) ? fields.boolean(key, out) : Status::ok();
}

constexpr Name<AttentionBlock> kAttentionBlocks[] = {
    {"gqa", AttentionBlock::gqa},     {"mla", AttentionBlock::mla},       {"short_conv", AttentionBlock::short_conv},
    {"delta", AttentionBlock::delta}, {"mamba2", AttentionBlock::mamba2}, {"mamba", AttentionBlock::mamba}};
constexpr Name<QkNorm> kQkNorms[] = {
    {"none", QkNorm::none}, {"head", QkNorm::head}, {"full", QkNorm::full}, {"unit", QkNorm::unit}};
constexpr Name<Scores> kScores[] = {
    {"softmax", Scores::softmax}, {"sigmoid", Scores::sigmoid}, {"sparsemixer", Scores::sparsemixer}};
constexpr Name<GroupScore> kGroupScores[] = {{"best", GroupScore::best}, {"best_two", GroupScore::best_two}};
constexpr Name<Activation> kActivations[] = {
    {"silu", Activation::silu}, {"swiglu_clamped", Activation::swiglu_clamped}, {"gelu_tanh", Activation::gelu_tanh}};
constexpr Name<NormPlace> kNormPlaces[] = {
    {"before", NormPlace::before}, {"after", NormPlace::after}, {"both", NormPlace::both}};

Status read_rope_of(const Fields& fields, const ModelSpec& model, uint32_t rotated_most, AttentionSpec* a) {
  SMOE_TRY(fields.u32("rope", 0, limits::kRopes, &a->rope));
  if (a->rope >= model.ropes.size()) return fields.bad("rope", "is not an index into arch.ropes");
  if (model.ropes[a->rope].inv_freq.size() * 2 > rotated_most) {
    return fields.bad("rope", "rotates more than " + std::to_string(rotated_most) + " values");
  }
  return Status::ok();
}

Status read_gqa(const Fields& fields, const ModelSpec& model, AttentionSpec* a) {
  SMOE_TRY(fields.only({"block", "heads", "kv_heads", "head_dim", "scale", "window", "qk_norm", "qkv_clip", "rope",
                        "norm_after_rope", "sinks", "chunk", "temperature", "temperature_floor", "gated"}));
  SMOE_TRY(fields.u32("heads", 1, limits::kHeads, &a->heads));
  SMOE_TRY(fields.u32("kv_heads", 1, a->heads, &a->kv_heads));
  if (a->heads % a->kv_heads != 0) return fields.bad("kv_heads", "does not divide heads");
  SMOE_TRY(fields.u32("head_dim", 1, limits::kHeadDim, &a->head_dim));
  SMOE_TRY(fields.f32("scale", 0, 1e4f, &a->scale));
  SMOE_TRY(fields.u32("window", 0, limits::kPositions, &a->window));
  SMOE_TRY(read_name(fields, "qk_norm", kQkNorms, &a->qk_norm, false));
  SMOE_TRY(fields.f32("qkv_clip", 0, std::numeric_limits<float>::max(), &a->qkv_clip));
  SMOE_TRY(optional_bool(fields, "norm_after_rope", &a->norm_after_rope));
  SMOE_TRY(optional_bool(fields, "sinks", &a->sinks));
  SMOE_TRY(optional_bool(fields, "gated", &a->gated));
  SMOE_TRY(optional_u32(fields, "chunk", 0, limits::kPositions, &a->chunk));
  SMOE_TRY(optional_f32(fields, "temperature", 0, 1e3f, &a->temperature));
  SMOE_TRY(optional_f32(fields, "temperature_floor", 1, 1e9f, &a->temperature_floor));
  return read_rope_of(fields, model, a->head_dim, a);
}

Status read_mla(const Fields& fields, const ModelSpec& model, AttentionSpec* a) {
  SMOE_TRY(fields.only(
      {"block", "heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim", "scale", "latent_eps", "rope"}));
  SMOE_TRY(fields.u32("heads", 1, limits::kHeads, &a->heads));
  SMOE_TRY(fields.u32("q_rank", 0, limits::kWidth, &a->q_rank));
  SMOE_TRY(fields.u32("kv_rank", 1, limits::kHeadDim / 2, &a->kv_rank));
  SMOE_TRY(fields.u32("nope_dim", 1, limits::kHeadDim, &a->nope_dim));
  SMOE_TRY(fields.u32("rope_dim", 0, limits::kHeadDim / 2, &a->rope_dim));
  SMOE_TRY(fields.u32("v_dim", 1, limits::kHeadDim, &a->v_dim));
  SMOE_TRY(fields.f32("scale", 0, 1e4f, &a->scale));
  SMOE_TRY(fields.f32("latent_eps", 0, 1, &a->latent_eps));
  // A head's rows are multiplied on their own, and kernels take whole panels of sixteen.
  if (a->kv_rank % 16 != 0) return fields.bad("kv_rank", "is not a multiple of 16");
  if (a->v_dim % 16 != 0) return fields.bad("v_dim", "is not a multiple of 16");
  a->kv_heads = 1;
  a->head_dim = a->kv_rank + a->rope_dim;
  return read_rope_of(fields, model, a->rope_dim, a);
}

// Heads of a matrix each, and the keys that they share.
Status read_heads(const Fields& fields, RecurrentSpec* r) {
  SMOE_TRY(fields.u32("heads", 1, limits::kHeads, &r->heads));
  SMOE_TRY(fields.u32("key_heads", 1, r->heads, &r->key_heads));
  if (r->heads % r->key_heads != 0) return fields.bad("key_heads", "does not divide heads");
  return fields.u32("value_dim", 1, limits::kHeadDim, &r->value_dim);
}

Status read_delta(const Fields& fields, RecurrentSpec* r) {
  SMOE_TRY(fields.only({"block", "taps", "heads", "key_heads", "key_dim", "value_dim", "eps", "rank", "channel_decay",
                        "sigmoid_gate", "tiled", "negative_rates"}));
  SMOE_TRY(optional_u32(fields, "rank", 0, limits::kWidth, &r->rank));
  SMOE_TRY(optional_bool(fields, "channel_decay", &r->channel_decay));
  SMOE_TRY(optional_bool(fields, "sigmoid_gate", &r->sigmoid_gate));
  SMOE_TRY(optional_bool(fields, "tiled", &r->tiled));
  SMOE_TRY(read_heads(fields, r));
  if (r->channel_decay && r->key_heads != r->heads) return fields.bad("channel_decay", "needs a key for each head");
  return Status::ok();
}

Status read_recurrent(const Fields& fields, AttentionBlock block, RecurrentSpec* r) {
  SMOE_TRY(fields.u32("taps", 2, kMaxTaps, &r->taps));
  if (block == AttentionBlock::short_conv || block == AttentionBlock::mamba) {
    r->heads = 1;
    SMOE_TRY(fields.u32("value_dim", 1, limits::kChannels, &r->value_dim));
  }
  if (block == AttentionBlock::short_conv) return fields.only({"block", "taps", "value_dim"});
  SMOE_TRY(fields.u32("key_dim", 1, kMaxStateKeys, &r->key_dim));
  SMOE_TRY(fields.f32("eps", 0, 1, &r->eps));
  SMOE_TRY(optional_bool(fields, "negative_rates", &r->negative_rates));
  if (block == AttentionBlock::mamba) {
    SMOE_TRY(fields.only({"block", "taps", "value_dim", "key_dim", "rank", "eps", "negative_rates"}));
    SMOE_TRY(fields.u32("rank", 1, limits::kWidth, &r->rank));
  } else if (block == AttentionBlock::mamba2) {
    SMOE_TRY(fields.only({"block", "taps", "heads", "key_heads", "key_dim", "value_dim", "eps", "negative_rates"}));
    SMOE_TRY(read_heads(fields, r));
  } else {
    SMOE_TRY(read_delta(fields, r));
  }
  if (r->channels() <= limits::kChannels) return Status::ok();
  return fields.bad("value_dim", "makes more than " + std::to_string(limits::kChannels) + " channels");
}

Status read_attention(const Fields& fields, const ModelSpec& model, LayerSpec* layer) {
  AttentionSpec* a = &layer->attention;
  SMOE_TRY(read_name(fields, "block", kAttentionBlocks, &a->block, false));
  if (a->is_recurrent()) return read_recurrent(fields, a->block, &layer->recurrent);
  return a->block == AttentionBlock::mla ? read_mla(fields, model, a) : read_gqa(fields, model, a);
}

Status read_expert_encodings(const Fields& ffn, const FfnSpec& f, uint32_t hidden, ExpertEncodings* out) {
  SMOE_ASSIGN(const Fields fields, ffn.object("encodings"));
  SMOE_TRY(fields.only({"gate", "up", "down"}));
  SMOE_TRY(read_encoding(fields, "gate", &out->gate));
  SMOE_TRY(read_encoding(fields, "up", &out->up));
  SMOE_TRY(read_encoding(fields, "down", &out->down));
  const auto check = [&](const char* key, Encoding e, uint32_t cols) {
    if (row_bytes(e, cols) != 0) return Status::ok();
    return fields.bad(key, "cannot hold rows of " + std::to_string(cols) + " values");
  };
  SMOE_TRY(check("gate", out->gate, hidden));
  SMOE_TRY(check("up", out->up, hidden));
  return check("down", out->down, f.expert_width);
}

Status read_router(const Fields& fields, FfnSpec* f) {
  SMOE_TRY(read_name(fields, "scores", kScores, &f->scores));
  SMOE_TRY(optional_bool(fields, "correction", &f->correction));
  SMOE_TRY(optional_bool(fields, "correct_logits", &f->correct_logits));
  SMOE_TRY(optional_u32(fields, "groups", 1, f->experts, &f->groups));
  SMOE_TRY(optional_u32(fields, "top_groups", 1, f->groups, &f->top_groups));
  SMOE_TRY(read_name(fields, "group_score", kGroupScores, &f->group_score));
  SMOE_TRY(optional_f32(fields, "jitter", 0, 1, &f->jitter));
  SMOE_TRY(optional_f32(fields, "norm_floor", 0, 1, &f->norm_floor));
  SMOE_TRY(optional_f32(fields, "norm_added", 0, 1, &f->norm_added));
  if (f->experts % f->groups != 0) return fields.bad("groups", "does not divide experts");
  if (f->experts / f->groups * f->top_groups < f->top_k) {
    return fields.bad("top_groups", "hold fewer experts than are chosen");
  }
  if (f->group_score == GroupScore::best_two && f->groups > 1 && f->experts / f->groups < 2) {
    return fields.bad("groups", "are of one expert each, and their best two count");
  }
  return Status::ok();
}

Status read_moe(const Fields& fields, uint32_t hidden, FfnSpec* f) {
  SMOE_TRY(fields.only({"block",          "experts",      "top_k",       "expert_width", "normalize",  "scaling",
                        "activation",     "shared_width", "shared_gate", "encodings",    "scores",     "correction",
                        "groups",         "top_groups",   "group_score", "jitter",       "norm_floor", "norm_added",
                        "correct_logits", "alpha",        "limit",       "expert_bias",  "scale_input"}));
  SMOE_TRY(fields.u32("experts", 1, limits::kExperts, &f->experts));
  SMOE_TRY(fields.u32("top_k", 1, f->experts, &f->top_k));
  SMOE_TRY(fields.u32("expert_width", 1, limits::kWidth, &f->expert_width));
  SMOE_TRY(fields.boolean("normalize", &f->normalize));
  SMOE_TRY(fields.f32("scaling", -1e4f, 1e4f, &f->scaling));
  SMOE_TRY(fields.u32("shared_width", 0, limits::kWidth, &f->shared_width));
  SMOE_TRY(fields.boolean("shared_gate", &f->shared_gate));
  if (f->shared_gate && f->shared_width == 0) return fields.bad("shared_gate", "is true without a shared expert");
  SMOE_TRY(optional_bool(fields, "scale_input", &f->scale_input));
  SMOE_TRY(read_router(fields, f));
  return read_expert_encodings(fields, *f, hidden, &f->encodings);
}

Status read_ffn(const Fields& fields, uint32_t hidden, FfnSpec* f) {
  std::string block;
  SMOE_TRY(fields.string("block", &block));
  if (block != "ffn" && block != "moe") return unknown_value(fields, "block", block);
  SMOE_TRY(read_name(fields, "activation", kActivations, &f->activation, false));
  SMOE_TRY(optional_f32(fields, "alpha", 1e-3f, 1e3f, &f->alpha));
  SMOE_TRY(optional_f32(fields, "limit", 0, 1e6f, &f->limit));
  SMOE_TRY(optional_bool(fields, "expert_bias", &f->expert_bias));
  if (block == "moe") return read_moe(fields, hidden, f);
  SMOE_TRY(fields.only({"block", "width", "activation", "alpha", "limit"}));
  return fields.u32("width", 1, limits::kWidth, &f->width);
}

Status read_layer(const Fields& layer, const ModelSpec& m, LayerSpec* out) {
  SMOE_TRY(layer.only({"attention", "ffn", "norms"}));
  SMOE_ASSIGN(const Fields attention, layer.object("attention"));
  SMOE_TRY(read_attention(attention, m, out));
  SMOE_ASSIGN(const Fields ffn, layer.object("ffn"));
  SMOE_TRY(read_ffn(ffn, m.hidden, &out->ffn));
  return read_name(layer, "norms", kNormPlaces, &out->norms);
}

}  // namespace

Status read_encoding(const Fields& fields, std::string_view key, Encoding* out) {
  std::string name;
  SMOE_TRY(fields.string(key, &name));
  if (!parse_encoding(name, out)) return fields.bad(key, "is an unknown encoding: " + json_quote(name));
  return Status::ok();
}

Status read_layers(const Fields& arch, ModelSpec* m) {
  SMOE_ASSIGN(const Json* list, arch.array("layers"));
  if (list->items().empty() || list->items().size() > limits::kLayers) {
    return arch.bad("layers", "does not have 1 to " + std::to_string(limits::kLayers) + " entries");
  }
  uint64_t experts = 0;
  m->layers.resize(list->items().size());
  for (size_t i = 0; i < m->layers.size(); ++i) {
    SMOE_ASSIGN(const Fields layer, Fields::of(list->items()[i], "arch.layers[" + std::to_string(i) + "]"));
    SMOE_TRY(read_layer(layer, *m, &m->layers[i]));
    experts += m->layers[i].ffn.experts;
  }
  if (experts > limits::kTotalExperts) {
    return arch.bad("layers", "have more than " + std::to_string(limits::kTotalExperts) + " experts");
  }
  return Status::ok();
}

}  // namespace smoe
