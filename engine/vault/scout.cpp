#include "vault/scout.h"

#include <algorithm>

#include "quant/quant.h"
#include "util/fields.h"
#include "vault/manifest.h"

namespace smoe::scout {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 56;

// Bytes of a value, 0 if unknown.
uint64_t dtype_bytes(const std::string& dtype) {
  if (dtype == "F32") return 4;
  if (dtype == "F16" || dtype == "BF16") return 2;
  return dtype == "U8" ? 1 : 0;
}

const char* dtype_of(Encoding e) {
  switch (e) {
    case Encoding::f32:
      return "F32";
    case Encoding::f16:
      return "F16";
    case Encoding::bf16:
      return "BF16";
    default:
      return "U8";
  }
}

bool shape_bytes(const std::vector<uint64_t>& shape, uint64_t each, uint64_t* out) {
  *out = each;
  for (const uint64_t size : shape) {
    if (__builtin_mul_overflow(*out, size, out)) return false;
  }
  return true;
}

std::string little_endian(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}

Status check_tensor(const Tensor& t, const std::map<std::string, TrunkEntry>& seen) {
  const uint64_t each = dtype_bytes(t.dtype);
  uint64_t bytes = 0;
  if (each == 0) return Status(Code::usage, "tensor " + t.name + " has the unknown dtype " + t.dtype);
  if (!shape_bytes(t.shape, each, &bytes) || bytes != t.bytes) {
    return Status(Code::usage, "tensor " + t.name + ": " + std::to_string(t.bytes) + " bytes are not " + t.dtype + " " +
                                   shape_text(t.shape));
  }
  if (seen.contains(t.name) || t.name == "__metadata__")
    return Status(Code::usage, "tensor " + t.name + " is given twice");
  return Status::ok();
}

// One tensor as its header entry has it.
struct Entry {
  std::string name;
  uint64_t begin = 0, end = 0;
};

Result<Entry> read_entry(const Fields& fields, const std::string& name, const TensorSpec& spec,
                         const std::vector<uint64_t>& shape) {
  SMOE_TRY(fields.only({"dtype", "shape", "data_offsets"}));
  std::string dtype;
  SMOE_TRY(fields.string("dtype", &dtype));
  if (dtype != dtype_of(spec.encoding)) return fields.bad("dtype", std::string("is not ") + dtype_of(spec.encoding));
  const uint64_t bytes = stored_bytes(spec.encoding, spec.layout, spec.rows, spec.cols);
  const std::vector<uint64_t> want = dtype == "U8" ? std::vector<uint64_t>{bytes} : shape;
  SMOE_ASSIGN(const Json* sizes, fields.array("shape"));
  bool same = sizes->items().size() == want.size();
  for (size_t i = 0; same && i < want.size(); ++i) {
    uint64_t size = 0;
    same = sizes->items()[i].to_u64(&size) && size == want[i];
  }
  if (!same) return fields.bad("shape", "is not " + shape_text(want));
  SMOE_ASSIGN(const Json* offsets, fields.array("data_offsets"));
  Entry entry{name};
  if (offsets->items().size() != 2 || !offsets->items()[0].to_u64(&entry.begin) ||
      !offsets->items()[1].to_u64(&entry.end) || entry.end < entry.begin || entry.end - entry.begin != bytes) {
    return fields.bad("data_offsets", "does not span " + std::to_string(bytes) + " bytes");
  }
  return entry;
}

Result<std::vector<Entry>> read_entries(const Json& json, const ModelSpec& model) {
  std::map<std::string, std::vector<uint64_t>> shapes;
  for (const TrunkTensor& tensor : trunk_tensors(model)) shapes[tensor.name] = tensor.shape;
  SMOE_ASSIGN(const Fields top, Fields::of(json, ""));
  std::vector<Entry> entries;
  for (const auto& [name, value] : top.json().members()) {
    if (name == "__metadata__") continue;
    const auto spec = model.tensors.find(name);
    if (spec == model.tensors.end()) return top.bad(name, "is not in the manifest");
    SMOE_ASSIGN(const Fields fields, Fields::of(value, name));
    SMOE_ASSIGN(Entry entry, read_entry(fields, name, spec->second, shapes[name]));
    entries.push_back(std::move(entry));
  }
  if (entries.size() != model.tensors.size()) {
    for (const auto& [name, spec] : model.tensors) {
      if (!top.has(name)) return top.bad(name, "is missing");
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  return entries;
}

}  // namespace

Result<Layout> lay_out(std::vector<Tensor> tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const Tensor& a, const Tensor& b) { return dtype_bytes(a.dtype) > dtype_bytes(b.dtype); });
  Layout out;
  std::string json = "{\"__metadata__\":{\"format\":\"smoe-scout\"}";
  uint64_t end = 0;
  for (const Tensor& t : tensors) {
    SMOE_TRY(check_tensor(t, out.entries));
    if (t.bytes > kMostBytes - end) return Status(Code::usage, "the trunk is larger than 2^56 bytes");
    out.entries[t.name] = {end, t.bytes};
    json.append(",").append(json_quote(t.name)).append(":{\"dtype\":\"").append(t.dtype);
    json.append("\",\"shape\":").append(shape_text(t.shape)).append(",\"data_offsets\":");
    json.append(shape_text({end, end + t.bytes})).append("}");
    end += t.bytes;
  }
  json += "}";
  while ((8 + json.size()) % 64 != 0) json += ' ';
  out.header = little_endian(json.size()) + json;
  for (auto& [name, entry] : out.entries) entry.offset += out.header.size();
  out.file_bytes = out.header.size() + end;
  return out;
}

Result<std::map<std::string, TrunkEntry>> parse(const std::string& header, uint64_t file_bytes,
                                                const ModelSpec& model) {
  SMOE_ASSIGN(const Json json, Json::parse(std::string_view(header).substr(8)));
  SMOE_ASSIGN(const std::vector<Entry> entries, read_entries(json, model));
  std::map<std::string, TrunkEntry> out;
  uint64_t end = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != end)
      return Status(Code::corrupt, entry.name + " does not begin where the tensor before it ends");
    out[entry.name] = {header.size() + entry.begin, entry.end - entry.begin};
    end = entry.end;
  }
  if (end != file_bytes - header.size()) return Status(Code::corrupt, "the file does not end with its last tensor");
  return out;
}

}  // namespace smoe::scout
