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

struct ProbeOptions {
  double seconds = 0.3;
  uint32_t depth = 8;    // records in flight
  uint32_t parts = 1;    // reads that one record is cut into
  bool batches = false;  // `depth` records at a time, all awaited before the next: as the misses of one layer come
  // Only records of the first so many bytes, each read once before the clock starts: a cache misses the same records
  // again and again, and a virtual disk's host keeps what was read a moment ago. 0 = all over the file, not read
  // before.
  uint64_t region_bytes = 0;
  DirectMode mode = DirectMode::automatic;
  ReaderKind kind = ReaderKind::automatic;
};

// Reads `record_bytes` (rounded up to kIoAlignment) at random places of `path`. Direct where that works. Errors:
// Code::io; Code::usage for a file smaller than a record, or no depth or parts.
Result<DiskSpeed> probe_disk(const std::string& path, uint64_t record_bytes, const ProbeOptions& options);

}  // namespace smoe
