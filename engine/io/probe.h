// How fast the disk that holds a file is, the way the engine reads it.
#pragma once

#include <cstdint>
#include <string>

#include "io/reader.h"

namespace smoe {

struct DiskSpeed {
  double read_bytes_s = 0;
  uint64_t reads = 0;
  bool direct = false;
  std::string backend;
};

// Reads `record_bytes` (rounded up to kIoAlignment) at random places of `path`, `depth` at a time, for `seconds`.
// Direct where that works. Errors: Code::io; Code::usage for a file smaller than a record.
Result<DiskSpeed> probe_disk(const std::string& path, uint64_t record_bytes, double seconds, uint32_t depth = 8,
                             DirectMode mode = DirectMode::automatic, ReaderKind kind = ReaderKind::automatic);

}  // namespace smoe
