// The manifest: JSON to ModelSpec. Strict: a number outside its range, an unknown field of `arch`, a tensor that no
// block asks for or one that is missing is refused, so that everything behind this file may trust the numbers.
#include "vault/manifest.h"

#include <algorithm>

#include "quant/quant.h"
#include "util/fields.h"
#include "vault/limits.h"
#include "vault/manifest_layers.h"

namespace smoe {
namespace {

Status read_frequencies(const Fields& fields, std::string_view key, std::vector<float>* out) {
  SMOE_ASSIGN(const Json* list, fields.array(key));
  if (list->items().size() > limits::kHeadDim / 2) return fields.bad(key, "is too long");
  out->resize(list->items().size());
  for (size_t i = 0; i < out->size(); ++i) {
    if (!json_f32(list->items()[i], 0, 1e4f, &(*out)[i])) {
      return fields.bad(key, "has an entry that is not a number from 0 to 10000, at index " + std::to_string(i));
    }
  }
  return Status::ok();
}

Status read_rope(const Json& json, const std::string& where, RopeSpec* rope) {
  SMOE_ASSIGN(const Fields fields, Fields::of(json, where));
  SMOE_TRY(fields.only({"inv_freq", "scale", "interleaved", "long_from", "long_inv_freq", "long_scale"}));
  SMOE_TRY(fields.f32("scale", 0, 1e4f, &rope->scale));
  SMOE_TRY(read_frequencies(fields, "inv_freq", &rope->inv_freq));
  if (fields.has("interleaved")) SMOE_TRY(fields.boolean("interleaved", &rope->interleaved));
  if (!fields.has("long_from")) return Status::ok();
  SMOE_TRY(fields.u32("long_from", 1, limits::kPositions, &rope->long_from));
  SMOE_TRY(fields.f32("long_scale", 0, 1e4f, &rope->long_scale));
  SMOE_TRY(read_frequencies(fields, "long_inv_freq", &rope->long_inv_freq));
  if (rope->long_inv_freq.size() != rope->inv_freq.size()) {
    return fields.bad("long_inv_freq", "is not as long as inv_freq");
  }
  return Status::ok();
}

Status read_norm_kind(const Fields& arch, NormKind* out) {
  if (!arch.has("norm")) return Status::ok();
  std::string name;
  SMOE_TRY(arch.string("norm", &name));
  if (name != "rms" && name != "layer") return arch.bad("norm", "is not rms or layer");
  *out = name == "rms" ? NormKind::rms : NormKind::layer;
  return Status::ok();
}

// Factors that most models do without.
Status read_scales(const Fields& arch, ModelSpec* m) {
  const auto optional = [&](const char* key, float* out) {
    return arch.has(key) ? arch.f32(key, -1e6f, 1e6f, out) : Status::ok();
  };
  SMOE_TRY(optional("embed_scale", &m->embed_scale));
  SMOE_TRY(optional("residual_scale", &m->residual_scale));
  return optional("logit_scale", &m->logit_scale);
}

Status read_arch(const Fields& arch, ModelSpec* m) {
  SMOE_TRY(arch.only({"hidden", "vocab", "max_positions", "norm_eps", "tied_head", "ropes", "layers", "norm",
                      "embed_scale", "residual_scale", "logit_scale"}));
  SMOE_TRY(arch.u32("hidden", 1, limits::kHidden, &m->hidden));
  SMOE_TRY(arch.u32("vocab", 1, limits::kVocab, &m->vocab));
  SMOE_TRY(arch.u32("max_positions", 1, limits::kPositions, &m->max_positions));
  SMOE_TRY(arch.f32("norm_eps", 0, 1, &m->norm_eps));
  SMOE_TRY(arch.boolean("tied_head", &m->tied_head));
  SMOE_TRY(read_norm_kind(arch, &m->norm));
  SMOE_TRY(read_scales(arch, m));
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
  if ((want.shape.size() == 1 || want.plain) && !encoding_info(t->encoding).plain)
    return fields.bad("encoding", "of a tensor that is read element by element is not plain");
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
