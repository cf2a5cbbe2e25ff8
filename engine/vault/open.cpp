// Opening: the cheap checks. Everything read is held against a size first, so no damage leads outside the files.
#include <algorithm>

#include "util/fields.h"
#include "vault/file.h"
#include "vault/format.h"
#include "vault/manifest.h"
#include "vault/scout.h"
#include "vault/vault.h"

namespace smoe {
namespace {

constexpr char kDamaged[] = "the file is damaged: copy it again, or convert the model again";

Status in_file(const std::string& path, const Status& s) {
  if (s.message().starts_with(path)) return s;
  return Status(s.code(), path + ": " + s.message(), s.hint().empty() ? kDamaged : s.hint());
}

std::string stem_of(const std::string& path) {
  return path.ends_with(".smoe") ? path.substr(0, path.size() - 5) : path;
}

Status read_manifest_part(const File& file, const format::Header& header, VaultFile* vault,
                          uint32_t* scout_header_crc) {
  vault->manifest_json.resize(header.manifest_bytes);
  SMOE_TRY(file.read_at(header.manifest_offset, vault->manifest_json.data(), header.manifest_bytes));
  if (crc32c(vault->manifest_json.data(), vault->manifest_json.size()) != header.manifest_crc) {
    return Status(Code::corrupt, "manifest: its checksum is wrong", kDamaged);
  }
  SMOE_ASSIGN(const Json json, Json::parse(vault->manifest_json));
  SMOE_ASSIGN(vault->model, read_manifest(json));
  SMOE_ASSIGN(const Fields top, Fields::of(json, ""));
  SMOE_ASSIGN(const Fields scout, top.object("scout"));
  SMOE_TRY(scout.u64("bytes", 8, UINT64_MAX, &vault->scout_bytes));
  return scout.u32("header_crc32c", 0, UINT32_MAX, scout_header_crc);
}

Status open_smoe(VaultFile* vault, uint32_t* scout_header_crc) {
  Result<File> opened = File::open_read(vault->path);
  if (!opened.is_ok()) {
    if (file_exists(vault->path)) return opened.status();
    return Status(Code::usage, vault->path + ": there is no such vault", "smoe list shows the vaults there are");
  }
  const File& file = *opened;
  SMOE_ASSIGN(vault->file_bytes, file.size());
  if (vault->file_bytes < format::kRecordsOffset) {
    return Status(Code::corrupt, "has only " + std::to_string(vault->file_bytes) + " bytes, too few for a vault",
                  kDamaged);
  }
  format::HeaderBytes bytes;
  SMOE_TRY(file.read_at(0, bytes.data(), bytes.size()));
  SMOE_ASSIGN(const format::Header header, format::decode_header(bytes, vault->file_bytes));
  SMOE_TRY(read_manifest_part(file, header, vault, scout_header_crc));
  // The model's limits bound the table before room for it is taken.
  uint64_t experts = 0;
  for (const LayerSpec& layer : vault->model.layers) experts += layer.ffn.experts;
  if (header.expert_count != experts) {
    return Status(Code::corrupt, "header: expert_count differs from the manifest", kDamaged);
  }
  std::vector<uint8_t> table(header.table_bytes);
  SMOE_TRY(file.read_at(header.table_offset, table.data(), table.size()));
  if (crc32c(table.data(), table.size()) != header.table_crc) {
    return Status(Code::corrupt, "expert table: its checksum is wrong", kDamaged);
  }
  SMOE_ASSIGN(vault->records, format::decode_table(table, header, vault->model));
  return Status::ok();
}

Status open_scout(VaultFile* vault, uint32_t header_crc) {
  Result<File> opened = File::open_read(vault->scout_path);
  if (!opened.is_ok()) {
    if (file_exists(vault->scout_path)) return opened.status();
    return Status(Code::corrupt, vault->scout_path + ": the trunk of " + vault->path + " is missing",
                  "put it beside the .smoe, or convert the model again");
  }
  SMOE_ASSIGN(const uint64_t size, opened->size());
  if (size != vault->scout_bytes) {
    return Status(Code::corrupt,
                  "has " + std::to_string(size) + " bytes, the vault asks for " + std::to_string(vault->scout_bytes),
                  "it is damaged or of another conversion: copy both files again, or convert the model again");
  }
  uint8_t prefix[8];
  SMOE_TRY(opened->read_at(0, prefix, sizeof prefix));
  uint64_t length = 0;
  for (int i = 0; i < 8; ++i) length |= uint64_t{prefix[i]} << (8 * i);
  if (length > std::min(size - 8, format::kMaxScoutHeaderBytes)) {
    return Status(Code::corrupt, "its header length is " + std::to_string(length), kDamaged);
  }
  std::string header(8 + length, '\0');
  SMOE_TRY(opened->read_at(0, header.data(), header.size()));
  if (crc32c(header.data(), header.size()) != header_crc) {
    return Status(Code::corrupt, "the checksum of its header is wrong",
                  "it is damaged or of another conversion: copy both files again, or convert the model again");
  }
  SMOE_ASSIGN(vault->trunk, scout::parse(header, size, vault->model));
  return Status::ok();
}

}  // namespace

Result<VaultFile> open_vault(const std::string& path, const std::string& scout_path) {
  VaultFile vault;
  vault.path = path;
  vault.scout_path = scout_path.empty() ? stem_of(path) + ".scout.safetensors" : scout_path;
  vault.tokenizer_dir = stem_of(path) + ".tokenizer";
  uint32_t scout_header_crc = 0;
  if (Status s = open_smoe(&vault, &scout_header_crc); !s.is_ok()) return in_file(path, s);
  if (Status s = open_scout(&vault, scout_header_crc); !s.is_ok()) return in_file(vault.scout_path, s);
  return vault;
}

}  // namespace smoe
