// The expert cache: one pool of equal slots. A slot in use by a computation is pinned and never evicted. Policy: exact
// LRU. Single caller (the engine thread); the reader's threads only fill buffers.
//
// Invariants
// - A slot holds a record only once all of it has been read (and checked, with verify_reads): a failed read leaves it
// empty.
// - begin() touches the residents among the experts in the caller's order; each miss becomes the most recent when its
// read
//   is issued, in the caller's order. The victim is the least recently used slot that is neither pinned nor being read
//   into.
// - begin, next, release and end issue reads whenever a slot is free and fewer than `depth` are in flight.
// - Any count of experts works with any number of slots >= 1, as long as the caller releases what it has before it asks
//   next() for more than there are slots.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/reader.h"
#include "smoe/status.h"

namespace smoe {

struct ExpertRecord {
  uint64_t offset = 0;
  uint64_t length = 0;
  uint32_t crc32c = 0;
  uint32_t layer = 0;  // absolute, for messages
};

struct CacheStats {
  // An expert asked for by begin() is a hit if it was resident then, else a miss. read_bytes and evictions count what
  // was done for it: a record read whole, a resident record that gave up its slot.
  uint64_t hits = 0, misses = 0, read_bytes = 0, evictions = 0;
  double wait_ms = 0;  // the caller's time in next() with nothing ready
};

struct ExpertRef {
  uint32_t expert = 0;
  uint32_t index = 0;             // position in the list passed to fetch()
  const uint8_t* data = nullptr;  // the record; pinned until release()
  uint32_t slot = 0;
};

class ExpertCache {
 public:
  // records[layer][expert] for the MoE layers in order. `memory` holds slots * slot_bytes, aligned to kIoAlignment.
  struct Config {
    std::vector<std::vector<ExpertRecord>> records;
    uint8_t* memory = nullptr;
    uint32_t slots = 0;
    uint64_t slot_bytes = 0;
    bool verify_reads = false;
    uint32_t depth = 8;  // reads in flight at most
  };
  // Errors: Code::usage for records that no slot can hold, memory or slots that are not aligned, or no slots.
  static Result<std::unique_ptr<ExpertCache>> create(Config config, std::unique_ptr<Reader> reader);
  virtual ~ExpertCache() = default;

  // Starts on the distinct experts of one layer, in the caller's order (router order for decode). Residents count as
  // hits and are pinned at once, misses are read as slots allow. One fetch at a time. Errors: Code::failed for an
  // unknown layer or expert, one given twice, or a fetch that is still open.
  virtual Status begin(uint32_t moe_layer, const uint32_t* experts, size_t count) = 0;
  // The experts that are ready and not yet handed out: appends at least one to `out`, blocking if need be; false = all
  // done. On an I/O error returns it, naming layer and expert; the caller then calls end(). With every slot held by the
  // caller and experts still to come it is Code::failed. `out` should have room reserved for `count`.
  virtual Result<bool> next(std::vector<ExpertRef>* out) = 0;
  virtual void release(const ExpertRef& ref) = 0;
  // Drops pins and waits for reads still in flight. Always called, also after an error.
  virtual void end() = 0;

  virtual CacheStats stats() const = 0;
  virtual const Reader& reader() const = 0;
};

}  // namespace smoe
