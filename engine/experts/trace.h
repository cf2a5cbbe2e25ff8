// Routing traces: all that a cache was asked for, so that any policy and any size can be tried on it afterwards.
//
// A file is the 8 bytes "SMOETRCE", a little-endian u32 that is the length of a JSON object, that object, then events
// to the end of the file; one cut short ends with the last whole event. The object: {"version":1, "model",
// "experts":[for each MoE layer], "top_k":[...], "slots", "policy"}: the last two are those of the cache that was
// traced. Numbers in events are varints (7 bits a byte, low ones first, the top bit set on all but the last):
//   1 layer tokens count (expert uses)...   a fetch, experts in the order in which the cache was asked; `uses` is there
//                                           only for tokens > 1
//   2 record 0|1      a record nobody asked for was made resident; 1: something might give way for it
//   3 record          a record that could not be read was dropped
//   4 slots           the cache has another size from now on
//   5 (f32 count)...  decayed counts of an earlier process, one for each record
// `layer` counts MoE layers, `record` their experts through all layers. Drops end a fetch; they come before the next
// one.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "experts/residency.h"
#include "smoe/status.h"

namespace smoe {

struct TraceHeader {
  std::string model, policy;
  uint32_t slots = 0;
  std::vector<uint32_t> experts, top_k;  // [moe layer]
};

// Writes events as they come, through a buffer; flush() at the end of a request. A full disk ends the trace, not the
// engine: status() tells.
class TraceWriter final : public ResidencyLog {
 public:
  // Replaces what is there. Errors: Code::io naming the path.
  static Result<std::unique_ptr<TraceWriter>> open(const std::string& path, const TraceHeader& header);
  ~TraceWriter() override;

  void fetch(uint32_t layer, const uint32_t* experts, const uint32_t* uses, size_t count, uint32_t tokens) override;
  void insert(uint32_t record, bool may_evict) override;
  void drop(uint32_t record) override;
  void resize(uint32_t slots) override;
  void seed(const std::vector<float>& counts) override;
  Status flush();

 private:
  explicit TraceWriter(std::FILE* file, std::string path) : file_(file), path_(std::move(path)) {}
  void put(uint64_t number);
  void write_if_full();

  std::FILE* file_;
  std::string path_, buffer_;
  bool failed_ = false;
};

// One event of a trace, in the terms of ResidencyLog.
struct TraceEvent {
  enum class Kind { fetch = 1, insert, drop, resize, seed };
  Kind kind = Kind::fetch;
  uint32_t layer = 0, tokens = 1;
  std::vector<uint32_t> experts, uses;  // uses is empty where each was used once
  uint32_t record = 0, slots = 0;
  bool may_evict = false;
  std::vector<float> counts;
};

// Reads a trace from memory. Errors: Code::corrupt naming `path` and the place.
class TraceReader {
 public:
  static Result<TraceReader> open(const std::string& path);
  const TraceHeader& header() const { return header_; }
  const ExpertTable& table() const { return table_; }
  // false at the end; a last event that was cut short is the end.
  Result<bool> next(TraceEvent* event);
  void rewind() { at_ = start_; }

 private:
  TraceReader(std::string path, std::string bytes) : path_(std::move(path)), bytes_(std::move(bytes)), table_({}) {}
  Status read_header();
  Status damaged(const char* what) const;
  bool take(uint64_t* number);
  bool take(uint32_t* number, uint32_t below, bool* valid);

  std::string path_, bytes_;
  size_t start_ = 0, at_ = 0;
  std::vector<bool> seen_;  // of the fetch being read
  TraceHeader header_;
  ExpertTable table_;
};

struct ReplayCounts {
  uint64_t hits = 0, misses = 0, evictions = 0;
  uint64_t decode_hits = 0, decode_misses = 0;  // of those the fetches for one token
  uint64_t steps = 0;                           // fetches for one token, of the first layer: decode steps
};

// The trace through a cache of `slots` under `policy` ("" and 0: as it was traced). Sizes change where the trace says
// so only if `slots` is 0. Fetches before the `skip`-th are not counted.
Result<ReplayCounts> replay_trace(TraceReader& trace, const std::string& policy, uint32_t slots, uint64_t skip = 0);
// The least possible misses: what gives way is what is needed last, and a record may pass through without staying.
Result<ReplayCounts> replay_optimal(TraceReader& trace, uint32_t slots, uint64_t skip = 0);

}  // namespace smoe
