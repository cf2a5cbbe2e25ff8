// The only code that knows a vault's bytes. The format is described in vault/FORMAT.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "experts/cache.h"
#include "smoe/model.h"
#include "smoe/status.h"
#include "util/crc32c.h"

namespace smoe {

struct TrunkEntry {
  uint64_t offset = 0, bytes = 0;  // in the scout file
};

// An opened vault. The cheap checks have run: sizes, header checksum, manifest checksum, table bounds and checksum,
// scout header against the manifest. Errors: Code::corrupt naming file, place and fix.
struct VaultFile {
  std::string path, scout_path, tokenizer_dir;
  uint64_t file_bytes = 0, scout_bytes = 0;
  std::string manifest_json;
  ModelSpec model;
  std::vector<std::vector<ExpertRecord>> records;  // [moe layer][expert]
  std::map<std::string, TrunkEntry> trunk;
};

Result<VaultFile> open_vault(const std::string& path, const std::string& scout_path = "");

// Reads one trunk tensor's stored bytes into `dst` (entry.bytes) and checks its CRC.
Status read_trunk_tensor(const VaultFile& vault, const std::string& name, uint8_t* dst);

struct VerifyReport {
  uint64_t checked_bytes = 0;
  std::vector<std::string> errors;
  bool ok() const { return errors.empty(); }
};
// Checks every byte of the three parts. progress(done, total) may return false to stop.
VerifyReport verify_vault(const std::string& path, const std::function<bool(uint64_t, uint64_t)>& progress);

}  // namespace smoe
