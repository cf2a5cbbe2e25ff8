// Reading records: asynchronous whole-record reads into aligned memory. Backends: io_uring, a pool of threads around
// pread, and an in-memory double with fault injection for the tests (memory.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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
  uint32_t registered_slots = 0;  // pinned for the kernel
};

// One caller, from one thread at a time.
class Reader {
 public:
  virtual ~Reader() = default;
  // The read begins at the latest with the next flush(), poll() or wait().
  virtual void submit(const ReadRequest& request) = 0;
  virtual void flush() {}
  // Blocks until one read has completed. Must not be called with nothing in flight.
  virtual ReadCompletion wait() = 0;
  virtual bool poll(ReadCompletion* out) = 0;
  // To be called before memory that was read into is given back to the system: a backend may have pinned it, and would
  // go on reading into the pages that were there. No read into it may be in flight. It may be read into again after.
  virtual void forget(const void* /*memory*/, size_t /*bytes*/) {}
  // Whether the file was written to since it was opened, as far as its size and time of change tell.
  virtual bool changed() const { return false; }
  virtual ReadStats stats() const = 0;
};

enum class DirectMode { automatic, direct, buffered };
enum class ReaderKind { automatic, uring, pread };

// The memory that reads go into, if it is known beforehand: equal slots side by side.
struct SlotMemory {
  uint8_t* base = nullptr;
  uint64_t slot_bytes = 0;
  uint32_t count = 0;
};

struct ReaderOptions {
  ReaderKind kind = ReaderKind::automatic;  // automatic: io_uring if a read through it works, else pread
  DirectMode mode = DirectMode::automatic;
  uint32_t workers = 8;  // threads of the pread pool
  SlotMemory slots;
};

// Opens `path` for reading records. Direct reads are probed with one real aligned read through the descriptor in use
// and fall back to buffered (tmpfs, overlayfs, FUSE). `notices` (may be null) gets a line for everything that is not as
// it should be. A failed read is retried once. Errors: Code::io, Code::usage for no workers.
Result<std::unique_ptr<Reader>> open_reader(const std::string& path, const ReaderOptions& options,
                                            std::vector<std::string>* notices);

}  // namespace smoe
