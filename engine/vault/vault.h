// The only code that knows a vault's bytes. The format is described in vault/FORMAT.md.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "experts/cache.h"
#include "io/reader.h"
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

// Where tensors of the trunk are wanted, by name: memory for their stored bytes (entry.bytes).
using TrunkPlaces = std::map<std::string, uint8_t*>;
// Reads them, in one pass over the file, and checks each one's CRC. `how` chooses backend and mode. Errors:
// Code::corrupt naming the tensor, Code::io, Code::resources.
Status read_trunk(const VaultFile& vault, ReaderOptions how, const TrunkPlaces& places);

struct VerifyReport {
  uint64_t checked_bytes = 0;
  std::vector<std::string> errors;
  bool ok() const { return errors.empty(); }
};
// Checks every byte of the three parts. progress(done, total) may return false to stop.
VerifyReport verify_vault(const std::string& path, const std::function<bool(uint64_t, uint64_t)>& progress);

}  // namespace smoe
