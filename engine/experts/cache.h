// The expert cache: one pool of equal slots. A slot in use by a computation is pinned and never read into. What is
// resident is decided by experts/residency.h when a fetch begins, before anything is read, so that it never depends on
// which read arrives first. Single caller (the engine thread); the reader's threads only fill buffers.
//
// Invariants
// - A slot is handed out only once all of its record has been read (and checked, with verify_reads or after the file
// was
//   written to while in use); a record whose read failed is not resident.
// - Misses are read in the caller's order, whenever a slot is free and fewer than `depth` reads are in flight.
// - Any count of experts works with any number of slots >= 1, as long as the caller releases what it has before it asks
//   next() for more than there are slots.
// - A read that nobody waits for (load) starts only when every read of the open fetch, if there is one, has started; a
//   guess (prefetch) only when they have arrived. A guess changes what is resident, never a byte of it. While less than
//   half of the guesses come true, none are made.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "experts/residency.h"
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
  // Reads begun on a guess, and those whose layer then asked for the record. Their bytes are in read_bytes.
  uint64_t guessed = 0, guessed_right = 0;
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
    uint32_t residents = 0;  // records held at most, 0 = as many as slots; the rest is there to be lent
    uint64_t slot_bytes = 0;
    bool verify_reads = false;
    uint32_t depth = 8;  // reads in flight at most
    std::string policy = kDefaultPolicy;
    ResidencyLog* log = nullptr;                                   // gets all that decides what is resident
    std::function<void(uint64_t offset, uint64_t bytes)> discard;  // gives memory of closed slots back to the system
    std::function<uint64_t()> committed;  // so many bytes from the first slot on have memory already; null: none
  };
  // Errors: Code::usage for records that no slot can hold, memory or slots that are not aligned, no slots, or an
  // unknown policy.
  static Result<std::unique_ptr<ExpertCache>> create(Config config, std::unique_ptr<Reader> reader);
  virtual ~ExpertCache() = default;

  // Starts on the distinct experts of one layer, in the caller's order (router order for decode). Residents count as
  // hits and are pinned at once, misses are read as slots allow. One fetch at a time. Errors: Code::failed for an
  // unknown layer or expert, one given twice, or a fetch that is still open. The fetch is made for `tokens` tokens, of
  // which uses[i] chose experts[i] (null: each one): what policies count.
  virtual Status begin(uint32_t moe_layer, const uint32_t* experts, size_t count, const uint32_t* uses = nullptr,
                       uint32_t tokens = 1) = 0;
  // The experts that are ready and not yet handed out: appends at least one to `out`, blocking if need be; false = all
  // done. On an I/O error returns it, naming layer and expert; the caller then calls end(). With every slot held by the
  // caller and experts still to come it is Code::failed. `out` should have room reserved for `count`.
  virtual Result<bool> next(std::vector<ExpertRef>* out) = 0;
  virtual void release(const ExpertRef& ref) = 0;
  // Drops pins and waits for this fetch's reads still in flight. Always called, also after an error.
  virtual void end() = 0;

  // Starts to read a record that nobody has asked for into a free slot, or with may_evict (a guess) into that of a
  // record that gives way; a guess stays until its layer's next fetch, unless a fetch needs its slot. False where
  // nothing was started: it is resident or on its way, there is no slot for it, guesses have half of the slots, the
  // open fetch has reads to start, or `depth` reads are in flight. A read that fails leaves the record out, without an
  // error.
  virtual bool load(uint32_t moe_layer, uint32_t expert, bool may_evict) = 0;
  // Whether a guess of this layer may be made: something of it is not resident, and guesses have come true lately.
  // Asking routers in vain takes 3% of a small model's token.
  virtual bool takes_guesses(uint32_t moe_layer) const = 0;
  // Guesses what a later layer will ask for, likeliest first: `most` of those not resident are loaded, with may_evict,
  // as soon as the disk has nothing else to do. Replaces what was guessed before and not yet begun; unknown ones are
  // ignored.
  virtual void prefetch(uint32_t moe_layer, const uint32_t* experts, size_t count, uint32_t most) = 0;
  // Takes in loads that have arrived, with `wait` at least one if any are in flight. How many still are.
  virtual uint32_t settle(bool wait) = 0;
  // Between fetches: another number of slots, from 1 to Config::slots, those that are lent among them. What no longer
  // fits is evicted, and the memory of closed slots is given back.
  virtual void resize(uint32_t slots) = 0;
  // Between fetches: the memory of the last `slots` slots, fewer than are open, for the caller to write to until it
  // lends another number; 0 takes all back. What lay there moves, or is evicted where there is no room for it.
  virtual uint8_t* lend(uint32_t slots) = 0;
  virtual uint32_t lent() const = 0;
  virtual uint32_t open_slots() const = 0;  // those that are lent among them
  // Between fetches: decayed counts of an earlier process, one for each record, before the first fetch.
  virtual void seed(const std::vector<float>& counts) = 0;

  virtual const Residency& residency() const = 0;
  virtual uint32_t touched_slots() = 0;  // that have memory: committed beforehand, or written to since they were opened
  virtual CacheStats stats() const = 0;
  virtual const Reader& reader() const = 0;
};

}  // namespace smoe
