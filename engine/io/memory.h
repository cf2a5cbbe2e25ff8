// A reader over a block of memory, for tests: it fails, cuts reads short, is late and reorders on demand, through the
// same retry and continuation code that reads the disk. No threads: a read happens when its completion is asked for.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "io/reader.h"

namespace smoe {

// What one call of the underlying read does instead of reading everything asked for.
struct Fault {
  int error = 0;     // errno to fail with, for example EIO
  size_t limit = 0;  // at most so many bytes; 0 = all
  bool end = false;  // the file ends here
};

struct MemoryReaderOptions {
  size_t alignment = 1;                          // as direct reads have it
  std::function<Fault(uint64_t call)> fault;     // asked for each underlying read, numbered from 0
  std::function<size_t(size_t waiting)> choose;  // which of the waiting requests completes next; default the first
  std::function<bool()> changed;                 // whether the file was written to; default no
  std::function<bool(uint64_t poll)> late;       // true: this poll() finds nothing
};

// `bytes` must outlive the reader.
std::unique_ptr<Reader> open_memory_reader(const std::vector<uint8_t>& bytes, MemoryReaderOptions options);

}  // namespace smoe
