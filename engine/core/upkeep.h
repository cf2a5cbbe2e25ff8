// What the engine does between requests: it fills the expert cache, what is used most first, gives memory back when the
// machine runs short of it and takes it again, and keeps the counts for the next process. All of it on the engine's own
// thread, in slices short enough that a request hardly waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "experts/cache.h"
#include "smoe/engine.h"
#include "smoe/plan.h"

namespace smoe {

// How many slots the memory has room for. `touched` slots have memory already; `others_bytes` is what the engine will
// still take beside the slots; `spare_bytes` stays free. Between `least` and `planned`.
struct Room {
  uint64_t record_bytes = 0, free_bytes = 0, others_bytes = 0, spare_bytes = 0;
  uint32_t touched = 0, least = 0, planned = 0;
};
uint32_t slots_that_fit(const Room& room);

class Upkeep {
 public:
  struct Config {
    std::string history;      // file; "" = nothing is kept
    std::string fingerprint;  // of the vault
    std::string memory_root;  // put before /proc and the cgroup mounts; tests pass a fake tree
    bool warm = true;
  };
  // `cache` and `plan` outlive the object.
  Upkeep(ExpertCache& cache, const Plan& plan, Config config, Log log);
  ~Upkeep() { save(); }

  // Before a request: fits the cache to the memory that is free now.
  void before_request() { fit_memory(); }
  void after_request() {
    unsaved_ = true;
    last_request_ = std::chrono::steady_clock::now();
  }
  // A slice of work, some milliseconds at most. True: there is more to be done at once.
  bool idle();

  uint32_t warmed() const { return warmed_; }  // records read without having been asked for
  bool warming() const { return config_.warm && slots_to_fill(order_.size()); }

 private:
  void read_history();
  void fit_memory();
  bool slots_to_fill(size_t end) const { return next_ < end && cache_.residency().held() < cache_.residency().slots(); }
  bool warm(size_t end);
  void save();

  ExpertCache& cache_;
  const Plan& plan_;
  const Config config_;
  const Log log_;
  // Records, most used first and layer by turns; the first known_ have been used, what is left to warm begins at next_.
  std::vector<uint32_t> order_;
  size_t known_ = 0, next_ = 0;
  uint32_t warmed_ = 0, told_slots_;
  bool unsaved_ = false, told_trouble_ = false;
  std::chrono::steady_clock::time_point last_fit_{}, last_save_{}, last_request_{};
};

}  // namespace smoe
