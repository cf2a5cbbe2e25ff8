// Which experts are resident: the bookkeeping of the cache without memory and without a disk. The live cache and the
// replay of a recorded trace are both made of it, so they count the same hits and misses. Nothing here depends on when
// a read arrives: all that a fetch evicts is decided when it begins.
//
// A fetch that asks for more than there are slots cannot keep it all: the first of it, residents before misses, pass
// through and are not resident afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "experts/policy.h"
#include "experts/usage.h"

namespace smoe {

// What happens to a Residency, as it happens; experts/trace.h writes it down. All calls from its one caller.
class ResidencyLog {
 public:
  virtual ~ResidencyLog() = default;
  // uses[i] of the tokens chose experts[i]; null: each once.
  virtual void fetch(uint32_t layer, const uint32_t* experts, const uint32_t* uses, size_t count, uint32_t tokens) = 0;
  virtual void insert(uint32_t record, bool may_evict) = 0;
  virtual void drop(uint32_t record) = 0;
  virtual void resize(uint32_t slots) = 0;
  virtual void seed(const std::vector<float>& counts) = 0;
};

class Residency {
 public:
  Residency(ExpertTable table, uint32_t slots, std::unique_ptr<Policy> policy, uint64_t random_seed = 1);

  struct Fetch {
    std::vector<uint32_t> hits, misses;  // indices into the caller's list, in its order
    std::vector<uint32_t> evicted;       // records that are resident no longer, none of this fetch
    uint32_t passing = 0;                // the first so many of hits and then misses do not stay
  };
  // Distinct experts of one layer. The answer is valid until the next call.
  const Fetch& fetch(uint32_t layer, const uint32_t* experts, const uint32_t* uses, size_t count, uint32_t tokens);

  // Makes a record resident that nobody has asked for. With may_evict it is a guess: it stays until the next fetch of
  // its layer, unless a fetch needs its slot. False, and nothing is done: it is resident, there is no slot for it, or
  // guesses have half of the slots. `evicted` gets the record that gave way, if one did.
  bool insert(uint32_t record, bool may_evict, uint32_t* evicted);
  // A record that could not be read.
  void drop(uint32_t record);
  // Another number of slots (at least 1) from now on; what does not fit any more is appended to `evicted`.
  void resize(uint32_t slots, std::vector<uint32_t>* evicted);
  // Decayed counts of an earlier process, [record].
  void seed(const std::vector<float>& counts);

  bool holds(uint32_t record) const { return place_[record] != kNone; }
  bool holds_all_of(uint32_t layer) const {
    return held_of_[layer] == table_.first_record[layer + 1] - table_.first_record[layer];
  }
  uint32_t slots() const { return slots_; }
  uint32_t held() const { return static_cast<uint32_t>(held_.size()); }
  const ExpertTable& table() const { return table_; }
  std::vector<float> counts() const;  // decayed, of every record, for the next process
  void log_to(ResidencyLog* log) { log_ = log; }

  static constexpr uint32_t kNone = UINT32_MAX;

 private:
  struct Candidate {
    double worth;
    uint32_t record;
  };
  static bool goes_later(const Candidate& a, const Candidate& b) {
    return a.worth != b.worth ? a.worth > b.worth : a.record > b.record;
  }
  bool protected_now(uint32_t record) const { return asked_in_[record] == fetch_ || guessed_[record]; }
  void forget_guesses(uint32_t first, uint32_t last);
  void hold(uint32_t record);
  void let_go(uint32_t record);
  void evict(uint32_t record, std::vector<uint32_t>* evicted);
  // Evicts `count` residents that the current fetch does not ask for.
  void make_room(uint32_t count, std::vector<uint32_t>* evicted);
  void compare_all(uint32_t count, std::vector<uint32_t>* evicted);
  // Puts the residents that may go into `ranks_[layer]`, the first to go in front.
  void rank(uint32_t layer);
  // The layer's next candidate that may go; kNone if there is none.
  uint32_t next_of(uint32_t layer);
  void compare_sampled(uint32_t count, std::vector<uint32_t>* evicted);
  uint32_t random(uint32_t below);

  const ExpertTable table_;
  const std::unique_ptr<Policy> policy_;
  Usage usage_;
  ResidencyLog* log_ = nullptr;
  uint32_t slots_;
  uint64_t random_;
  uint64_t fetch_ = 0;
  Fetch answer_;
  std::vector<uint64_t> asked_in_;  // [record], the last fetch that asked for it
  std::vector<uint32_t> held_;      // the residents, in no order
  std::vector<uint32_t> place_;     // [record], in held_
  std::vector<uint32_t> held_of_;   // [layer], how many
  // Of each layer its residents as they would go. Some may have left since, none has come or changed its place.
  struct Ranks {
    std::vector<uint32_t> records;
    size_t next = 0;  // of the present comparison
    bool stale = true;
  };
  std::vector<Ranks> ranks_;  // [layer]
  std::vector<Candidate> candidates_;
  std::vector<uint32_t> guesses_;  // records made resident on a guess whose layer has not had its turn since
  std::vector<bool> guessed_;      // [record], whether it is one of them
  std::vector<uint32_t> spared_;   // passed over for their layer's floor; they go when nothing else is left
};

}  // namespace smoe
