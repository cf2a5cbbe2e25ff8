#include "vault/format.h"

#include <cstring>

#include "util/crc32c.h"

namespace smoe::format {
namespace {

constexpr char kMagic[8] = {'S', 'M', 'O', 'E', 'V', 'L', 'T', '1'};
constexpr char kForeignMagic[8] = {'S', 'M', 'O', 'E', '\xDE', '\xEA', '\x00', '\x01'};
constexpr uint32_t kVersion = 1;
constexpr size_t kUsedBytes = 96, kCrcOffset = kHeaderBytes - 4;

class Writer {
 public:
  explicit Writer(uint8_t* at) : at_(at) {}
  template <class T>
  Writer& put(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) *at_++ = static_cast<uint8_t>(value >> (8 * i));
    return *this;
  }

 private:
  uint8_t* at_;
};

class Reader {
 public:
  explicit Reader(const uint8_t* at) : at_(at) {}
  template <class T>
  T get() {
    T value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(*at_++) << (8 * i);
    return value;
  }

 private:
  const uint8_t* at_;
};

Status bad(const std::string& what) {
  return Status(Code::corrupt, "header: " + what, "the file is damaged: copy it again, or convert the model again");
}

Status check_kind(const HeaderBytes& bytes) {
  if (std::memcmp(bytes.data(), kMagic, 8) == 0) return Status::ok();
  if (std::memcmp(bytes.data(), kForeignMagic, 8) == 0) {
    return Status(Code::corrupt, "is a vault of S-MoE, whose format is a different one",
                  "convert the model from its checkpoint with smoe convert");
  }
  return Status(Code::corrupt, "is not a vault (its first bytes are not SMOEVLT1)", "give the path of a .smoe file");
}

}  // namespace

HeaderBytes encode_header(const Header& h) {
  HeaderBytes bytes{};
  std::memcpy(bytes.data(), kMagic, 8);
  Writer w(bytes.data() + 8);
  w.put(kVersion).put(static_cast<uint32_t>(kHeaderBytes)).put(h.file_bytes);
  w.put(kRecordsOffset).put(h.records_bytes).put(h.table_offset).put(h.table_bytes);
  w.put(h.manifest_offset).put(h.manifest_bytes).put(h.table_crc).put(h.manifest_crc);
  w.put(h.expert_count).put(h.moe_layers);
  Writer(bytes.data() + kCrcOffset).put(crc32c(bytes.data(), kCrcOffset));
  return bytes;
}

Result<Header> decode_header(const HeaderBytes& bytes, uint64_t file_bytes) {
  SMOE_TRY(check_kind(bytes));
  Reader r(bytes.data() + 8);
  if (const uint32_t version = r.get<uint32_t>(); version != kVersion) {
    return Status(Code::corrupt, "has vault format version " + std::to_string(version) + ", this smoe reads version 1",
                  "update smoe, or convert the model again with this version");
  }
  if (Reader(bytes.data() + kCrcOffset).get<uint32_t>() != crc32c(bytes.data(), kCrcOffset)) {
    return bad("its checksum is wrong");
  }
  if (r.get<uint32_t>() != kHeaderBytes) return bad("header_bytes is not 4096");
  Header h;
  h.file_bytes = r.get<uint64_t>();
  if (r.get<uint64_t>() != kRecordsOffset) return bad("records_offset is not 16384");
  h.records_bytes = r.get<uint64_t>();
  h.table_offset = r.get<uint64_t>();
  h.table_bytes = r.get<uint64_t>();
  h.manifest_offset = r.get<uint64_t>();
  h.manifest_bytes = r.get<uint64_t>();
  h.table_crc = r.get<uint32_t>();
  h.manifest_crc = r.get<uint32_t>();
  h.expert_count = r.get<uint64_t>();
  h.moe_layers = r.get<uint32_t>();
  for (size_t i = kUsedBytes; i < kCrcOffset; ++i) {
    if (bytes[i] != 0) return bad("byte " + std::to_string(i) + " is not zero");
  }
  if (h.file_bytes != file_bytes) {
    return bad("the file has " + std::to_string(file_bytes) + " bytes, it should have " + std::to_string(h.file_bytes));
  }
  // Each part is first held against the file's size, so that no sum below can overflow.
  for (const uint64_t bytes_of : {h.records_bytes, h.table_bytes, h.manifest_bytes}) {
    if (bytes_of > file_bytes) return bad("a part is larger than the file");
  }
  if (h.table_bytes / kEntryBytes != h.expert_count || h.table_bytes % kEntryBytes != 0) {
    return bad("table_bytes does not match expert_count");
  }
  if (h.table_offset != kRecordsOffset + h.records_bytes) return bad("table_offset is not the end of the records");
  if (h.manifest_offset != h.table_offset + h.table_bytes) return bad("manifest_offset is not the end of the table");
  if (h.manifest_bytes > kMaxManifestBytes) return bad("manifest_bytes is more than 64 MiB");
  if (h.manifest_offset + h.manifest_bytes != file_bytes) return bad("file_bytes is not the end of the manifest");
  return h;
}

std::vector<uint8_t> encode_table(const std::vector<std::vector<ExpertRecord>>& records,
                                  const std::vector<uint32_t>& layers) {
  size_t count = 0;
  for (const auto& layer : records) count += layer.size();
  std::vector<uint8_t> bytes(count * kEntryBytes);
  uint8_t* at = bytes.data();
  for (size_t l = 0; l < records.size(); ++l) {
    for (size_t e = 0; e < records[l].size(); ++e, at += kEntryBytes) {
      const ExpertRecord& r = records[l][e];
      Writer(at)
          .put(r.offset)
          .put(r.length)
          .put(r.crc32c)
          .put(layers[l])
          .put(static_cast<uint32_t>(e))
          .put(uint32_t{0});
    }
  }
  return bytes;
}

Result<std::vector<std::vector<ExpertRecord>>> decode_table(const std::vector<uint8_t>& bytes, const Header& h,
                                                            const ModelSpec& model) {
  uint64_t experts = 0;
  for (const LayerSpec& layer : model.layers) experts += layer.ffn.experts;
  if (h.expert_count != experts || bytes.size() != experts * kEntryBytes) {
    return bad("expert_count is " + std::to_string(h.expert_count) + ", the manifest has " + std::to_string(experts));
  }
  if (h.moe_layers != model.moe_layers()) return bad("moe_layers differs from the manifest");
  std::vector<std::vector<ExpertRecord>> records;
  uint64_t offset = kRecordsOffset;
  const uint8_t* at = bytes.data();
  for (size_t layer = 0; layer < model.layers.size(); ++layer) {
    const FfnSpec& ffn = model.layers[layer].ffn;
    if (!ffn.is_moe()) continue;
    const uint64_t length = record_layout(ffn, model.hidden).length;
    auto& list = records.emplace_back(ffn.experts);
    for (uint32_t e = 0; e < ffn.experts; ++e, at += kEntryBytes, offset += length) {
      Reader r(at);
      list[e].offset = r.get<uint64_t>();
      list[e].length = r.get<uint64_t>();
      list[e].crc32c = r.get<uint32_t>();
      list[e].layer = static_cast<uint32_t>(layer);
      const bool in_place = r.get<uint32_t>() == layer && r.get<uint32_t>() == e && r.get<uint32_t>() == 0;
      if (in_place && list[e].offset == offset && list[e].length == length) continue;
      return Status(Code::corrupt,
                    "expert table: the entry of layer " + std::to_string(layer) + ", expert " + std::to_string(e) +
                        " is not what the manifest asks for",
                    "convert the model again");
    }
  }
  if (offset != h.table_offset) return bad("the records do not end where the table begins");
  return records;
}

}  // namespace smoe::format
