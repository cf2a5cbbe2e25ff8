// Reading records: asynchronous whole-record reads into aligned memory. Backends: pread pool, (later) io_uring,
// in-memory double with fault injection for the tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "smoe/status.h"

namespace smoe {

inline constexpr size_t kIoAlignment = 4096;  // of offsets, lengths and buffers: enough for O_DIRECT on what we met

struct ReadRequest {
  uint64_t offset = 0;
  size_t length = 0;
  void* buffer = nullptr;
  uint64_t tag = 0;  // the caller's; comes back with the completion
};

struct ReadCompletion {
  uint64_t tag = 0;
  Status status;  // short read, end of file and errno are errors that name file, offset and what happened
  uint32_t latency_us = 0;
};

struct ReadStats {
  uint64_t reads = 0, bytes = 0, errors = 0, retries = 0;
  bool direct = false;
  std::string backend;
};

class Reader {
 public:
  virtual ~Reader() = default;
  virtual void submit(const ReadRequest& request) = 0;
  // Blocks until one read has completed. Must not be called with nothing in flight.
  virtual ReadCompletion wait() = 0;
  virtual bool poll(ReadCompletion* out) = 0;
  virtual ReadStats stats() const = 0;
};

enum class DirectMode { automatic, direct, buffered };

// A pool of `workers` threads around pread. Direct reads are probed with one real aligned read through the descriptor
// in use and fall back to buffered with a notice in `notice` (tmpfs, overlayfs, FUSE). A failed read is retried once.
Result<std::unique_ptr<Reader>> open_pread_reader(const std::string& path, DirectMode mode, uint32_t workers,
                                                  std::string* notice);

}  // namespace smoe
