// The manifest: JSON to ModelSpec. Strict: a number outside its range, an unknown field of `arch`, a tensor that no
// block asks for or one that is missing is refused, so that everything behind this file may trust the numbers.
#include "vault/manifest.h"

#include <algorithm>
#include <limits>

#include "quant/quant.h"
#include "util/fields.h"
#include "vault/limits.h"

namespace smoe {
namespace {

Status read_encoding(const Fields& fields, std::string_view key, Encoding* out) {
  std::string name;
  SMOE_TRY(fields.string(key, &name));
  if (!parse_encoding(name, out)) return fields.bad(key, "is an unknown encoding: " + json_quote(name));
  return Status::ok();
}

Status expect_block(const Fields& fields, std::string_view key, std::string_view want) {
  std::string got;
  SMOE_TRY(fields.string(key, &got));
  if (got == want) return Status::ok();
  return Status(Code::corrupt, fields.name(key) + " is " + json_quote(got) + ", which this version does not know",
                "update smoe, or convert the model again with this version");
}

Status read_rope(const Json& json, const std::string& where, RopeSpec* rope) {
  SMOE_ASSIGN(const Fields fields, Fields::of(json, where));
  SMOE_TRY(fields.only({"inv_freq", "scale"}));
  SMOE_TRY(fields.f32("scale", 0, 1e4f, &rope->scale));
  SMOE_ASSIGN(const Json* list, fields.array("inv_freq"));
  if (list->items().size() > limits::kHeadDim / 2) return fields.bad("inv_freq", "is too long");
  rope->inv_freq.resize(list->items().size());
  for (size_t i = 0; i < rope->inv_freq.size(); ++i) {
    if (!json_f32(list->items()[i], 0, 1e4f, &rope->inv_freq[i])) {
      return fields.bad("inv_freq", "has an entry that is not a number from 0 to 10000, at index " + std::to_string(i));
    }
  }
  return Status::ok();
}

Status read_qk_norm(const Fields& fields, QkNorm* out) {
  std::string name;
  SMOE_TRY(fields.string("qk_norm", &name));
  if (name == "none") {
    *out = QkNorm::none;
  } else if (name == "head") {
    *out = QkNorm::head;
  } else if (name == "full") {
    *out = QkNorm::full;
  } else {
    return fields.bad("qk_norm", "is not none, head or full");
  }
  return Status::ok();
}

Status read_attention(const Fields& fields, const ModelSpec& model, AttentionSpec* a) {
  SMOE_TRY(expect_block(fields, "block", "gqa"));
  SMOE_TRY(fields.only({"block", "heads", "kv_heads", "head_dim", "scale", "window", "qk_norm", "qkv_clip", "rope"}));
  SMOE_TRY(fields.u32("heads", 1, limits::kHeads, &a->heads));
  SMOE_TRY(fields.u32("kv_heads", 1, a->heads, &a->kv_heads));
  if (a->heads % a->kv_heads != 0) return fields.bad("kv_heads", "does not divide heads");
  SMOE_TRY(fields.u32("head_dim", 1, limits::kHeadDim, &a->head_dim));
  SMOE_TRY(fields.f32("scale", 0, 1e4f, &a->scale));
  SMOE_TRY(fields.u32("window", 0, limits::kPositions, &a->window));
  SMOE_TRY(read_qk_norm(fields, &a->qk_norm));
  SMOE_TRY(fields.f32("qkv_clip", 0, std::numeric_limits<float>::max(), &a->qkv_clip));
  SMOE_TRY(fields.u32("rope", 0, limits::kRopes, &a->rope));
  if (a->rope >= model.ropes.size()) return fields.bad("rope", "is not an index into arch.ropes");
  if (model.ropes[a->rope].inv_freq.size() * 2 > a->head_dim) return fields.bad("rope", "rotates more than head_dim");
  return Status::ok();
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

Status read_moe(const Fields& fields, uint32_t hidden, FfnSpec* f) {
  SMOE_TRY(fields.only({"block", "experts", "top_k", "expert_width", "normalize", "scaling", "activation",
                        "shared_width", "shared_gate", "encodings"}));
  SMOE_TRY(fields.u32("experts", 1, limits::kExperts, &f->experts));
  SMOE_TRY(fields.u32("top_k", 1, f->experts, &f->top_k));
  SMOE_TRY(fields.u32("expert_width", 1, limits::kWidth, &f->expert_width));
  SMOE_TRY(fields.boolean("normalize", &f->normalize));
  SMOE_TRY(fields.f32("scaling", -1e4f, 1e4f, &f->scaling));
  SMOE_TRY(fields.u32("shared_width", 0, limits::kWidth, &f->shared_width));
  SMOE_TRY(fields.boolean("shared_gate", &f->shared_gate));
  if (f->shared_gate && f->shared_width == 0) return fields.bad("shared_gate", "is true without a shared expert");
  return read_expert_encodings(fields, *f, hidden, &f->encodings);
}

Status read_ffn(const Fields& fields, uint32_t hidden, FfnSpec* f) {
  std::string block;
  SMOE_TRY(fields.string("block", &block));
  if (block != "ffn") SMOE_TRY(expect_block(fields, "block", "moe"));
  SMOE_TRY(expect_block(fields, "activation", "silu"));
  if (block == "moe") return read_moe(fields, hidden, f);
  SMOE_TRY(fields.only({"block", "width", "activation"}));
  return fields.u32("width", 1, limits::kWidth, &f->width);
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
    SMOE_TRY(layer.only({"attention", "ffn"}));
    SMOE_ASSIGN(const Fields attention, layer.object("attention"));
    SMOE_TRY(read_attention(attention, *m, &m->layers[i].attention));
    SMOE_ASSIGN(const Fields ffn, layer.object("ffn"));
    SMOE_TRY(read_ffn(ffn, m->hidden, &m->layers[i].ffn));
    experts += m->layers[i].ffn.experts;
  }
  if (experts > limits::kTotalExperts) {
    return arch.bad("layers", "have more than " + std::to_string(limits::kTotalExperts) + " experts");
  }
  return Status::ok();
}

Status read_arch(const Fields& arch, ModelSpec* m) {
  SMOE_TRY(arch.only({"hidden", "vocab", "max_positions", "norm_eps", "tied_head", "ropes", "layers"}));
  SMOE_TRY(arch.u32("hidden", 1, limits::kHidden, &m->hidden));
  SMOE_TRY(arch.u32("vocab", 1, limits::kVocab, &m->vocab));
  SMOE_TRY(arch.u32("max_positions", 1, limits::kPositions, &m->max_positions));
  SMOE_TRY(arch.f32("norm_eps", 0, 1, &m->norm_eps));
  SMOE_TRY(arch.boolean("tied_head", &m->tied_head));
  SMOE_ASSIGN(const Json* ropes, arch.array("ropes"));
  if (ropes->items().size() > limits::kRopes) return arch.bad("ropes", "has too many entries");
  m->ropes.resize(ropes->items().size());
  for (size_t i = 0; i < m->ropes.size(); ++i) {
    SMOE_TRY(read_rope(ropes->items()[i], "arch.ropes[" + std::to_string(i) + "]", &m->ropes[i]));
  }
  return read_layers(arch, m);
}

Status read_generation(const Fields& top, GenerationDefaults* g) {
  SMOE_ASSIGN(const Fields fields, top.object("generation"));
  const auto optional = [&](const char* key, float low, float high, float* out) {
    return fields.has(key) ? fields.f32(key, low, high, out) : Status::ok();
  };
  SMOE_TRY(optional("temperature", 0, 1e4f, &g->temperature));
  SMOE_TRY(optional("top_p", 0, 1, &g->top_p));
  SMOE_TRY(optional("repetition_penalty", 1e-4f, 1e4f, &g->repetition_penalty));  // logits are divided by it
  if (!fields.has("top_k")) return Status::ok();
  uint32_t top_k = 0;
  SMOE_TRY(fields.u32("top_k", 0, limits::kVocab, &top_k));
  g->top_k = static_cast<int>(top_k);
  return Status::ok();
}

Status read_token_ids(const Fields& top, ModelSpec* m) {
  SMOE_ASSIGN(const Json* eos, top.array("eos_ids"));
  for (const Json& item : eos->items()) {
    uint64_t id = 0;
    if (!item.to_u64(&id) || id >= m->vocab)
      return top.bad("eos_ids", "has an entry that is not an id below arch.vocab");
    m->eos_ids.push_back(static_cast<int32_t>(id));
  }
  SMOE_ASSIGN(const Json* bos, top.any("bos_id"));
  uint64_t id = 0;
  if (bos->type() == Json::Type::null || (bos->to_u64(&id) && id < m->vocab)) return Status::ok();
  return top.bad("bos_id", "is neither null nor an id below arch.vocab");
}

Status read_layout(const Fields& fields, const ModelSpec& m, const std::string& name, TensorSpec* t) {
  std::string layout;
  SMOE_TRY(fields.string("layout", &layout));
  if (layout != "rows" && layout != "panel16") return fields.bad("layout", "is not rows or panel16");
  t->layout = layout == "rows" ? Layout::rows : Layout::panel16;
  // Only single rows of an embedding that is not also the head are read; every other quantised matrix is multiplied.
  const bool rows = encoding_info(t->encoding).plain || (name == "embed.weight" && !m.tied_head);
  if (rows == (t->layout == Layout::rows)) return Status::ok();
  return fields.bad("layout", std::string("is not ") + (rows ? "rows" : "panel16"));
}

Status read_tensor(const Fields& fields, const ModelSpec& m, const TrunkTensor& want, TensorSpec* t) {
  SMOE_TRY(read_encoding(fields, "encoding", &t->encoding));
  SMOE_ASSIGN(const Json* shape, fields.array("shape"));
  bool same = shape->items().size() == want.shape.size();
  for (size_t i = 0; same && i < want.shape.size(); ++i) {
    uint64_t size = 0;
    same = shape->items()[i].to_u64(&size) && size == want.shape[i];
  }
  if (!same) {
    return fields.bad("shape", "is not " + shape_text(want.shape) + ", which the layers ask for");
  }
  t->rows = want.shape.size() == 2 ? want.shape[0] : 1;
  t->cols = want.shape.back();
  if (want.shape.size() == 1 && !encoding_info(t->encoding).plain)
    return fields.bad("encoding", "of a vector is not plain");
  if (row_bytes(t->encoding, t->cols) == 0) {
    return fields.bad("encoding", "cannot hold rows of " + std::to_string(t->cols) + " values");
  }
  SMOE_TRY(read_layout(fields, m, want.name, t));
  return fields.u32("crc32c", 0, UINT32_MAX, &t->crc32c);
}

Status read_tensors(const Fields& top, ModelSpec* m) {
  SMOE_ASSIGN(const Fields tensors, top.object("tensors"));
  std::map<std::string, TrunkTensor> wanted;
  for (TrunkTensor& tensor : trunk_tensors(*m)) wanted.emplace(tensor.name, std::move(tensor));
  for (const auto& [name, json] : tensors.json().members()) {
    const auto want = wanted.find(name);
    if (want == wanted.end()) return tensors.bad(name, "is a tensor that no layer asks for");
    SMOE_ASSIGN(const Fields fields, Fields::of(json, tensors.name(name)));
    SMOE_TRY(read_tensor(fields, *m, want->second, &m->tensors[name]));
  }
  for (const auto& [name, tensor] : wanted) {
    if (tensor.required && !m->tensors.contains(name)) return tensors.bad(name, "is missing");
  }
  return Status::ok();
}

Result<ModelSpec> read_all(const Json& manifest) {
  SMOE_ASSIGN(const Fields top, Fields::of(manifest, ""));
  uint64_t format = 0;
  SMOE_TRY(top.u64("format", 1, 1, &format));
  ModelSpec m;
  SMOE_TRY(top.string("id", &m.id));
  SMOE_TRY(top.string("family", &m.family));
  SMOE_TRY(top.string("model_type", &m.model_type));
  SMOE_TRY(top.string("quant", &m.quant));
  SMOE_ASSIGN(const Fields arch, top.object("arch"));
  SMOE_TRY(read_arch(arch, &m));
  SMOE_TRY(read_token_ids(top, &m));
  SMOE_TRY(read_generation(top, &m.generation));
  SMOE_TRY(read_tensors(top, &m));
  return m;
}

}  // namespace

Result<ModelSpec> read_manifest(const Json& manifest) {
  Result<ModelSpec> model = read_all(manifest);
  if (model.is_ok()) return model;
  const Status& s = model.status();
  return Status(s.code(), "manifest: " + s.message(), s.hint().empty() ? "convert the model again" : s.hint());
}

Result<ModelSpec> parse_manifest(const std::string& json) {
  Result<Json> parsed = Json::parse(json);
  if (!parsed.is_ok())
    return Status(Code::corrupt, "manifest: " + parsed.status().message(), "convert the model again");
  return read_manifest(*parsed);
}

}  // namespace smoe
