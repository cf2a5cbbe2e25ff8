// The one ExpertCache there is, over equal slots. Its parts: cache.cpp reads what a fetch asks for, cache_guesses.cpp
// what nobody has asked for yet, cache_slots.cpp opens, closes and lends slots.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "experts/cache.h"

namespace smoe {

// Whether to go on guessing: of the last guesses (a decaying count) at least half came true. If not, none is made for a
// while; then it is tried again.
class GuessJudge {
 public:
  bool allows() const { return pause_ == 0; }
  void next_fetch() {
    if (pause_ > 0) --pause_;
  }
  void judge(bool right) {
    right_ += right;
    if (++made_ < kSample) return;
    if (right_ * 2 < made_) pause_ = kPause;
    made_ /= 2;
    right_ /= 2;
  }

 private:
  static constexpr uint32_t kSample = 64, kPause = 2048;  // guesses; fetches, that is layers of tokens
  uint32_t made_ = 0, right_ = 0, pause_ = 0;
};

class SlotCache : public ExpertCache {
 public:
  SlotCache(Config config, std::unique_ptr<Reader> reader, ExpertTable table, std::unique_ptr<Policy> policy)
      : config_(std::move(config)),
        reader_(std::move(reader)),
        residency_(std::move(table), std::max(1u, room_for(config_.slots)), std::move(policy)),
        slots_(config_.slots),
        open_slots_(config_.slots) {
    residency_.log_to(config_.log);
    slot_of_.assign(residency_.table().records(), kNone);
    asked_in_.assign(residency_.table().records(), 0);
    size_t widest = 0;
    for (const auto& layer : config_.records) widest = std::max(widest, layer.size());
    wanted_.reserve(widest);
    misses_.reserve(widest);
    ready_.reserve(widest);
    guesses_.reserve(widest);
    guessed_.reserve(config_.slots);
    free_.reserve(config_.slots);
    touched_.assign(config_.slots, false);
    for (uint32_t slot = config_.slots; slot-- > 0;) free_.push_back(slot);
  }
  ~SlotCache() override {
    end();
    while (in_flight_ > 0) complete(reader_->wait());
  }

  Status begin(uint32_t moe_layer, const uint32_t* experts, size_t count, const uint32_t* uses,
               uint32_t tokens) override;
  Result<bool> next(std::vector<ExpertRef>* out) override;
  void release(const ExpertRef& ref) override;
  void end() override;
  bool load(uint32_t moe_layer, uint32_t expert, bool may_evict) override;
  bool takes_guesses(uint32_t moe_layer) const override {
    return judge_.allows() && !residency_.holds_all_of(moe_layer);
  }
  void prefetch(uint32_t moe_layer, const uint32_t* experts, size_t count, uint32_t most) override;
  uint32_t settle(bool wait) override;
  void resize(uint32_t slots) override;
  uint8_t* lend(uint32_t slots) override;
  uint32_t lent() const override { return lent_; }
  uint32_t open_slots() const override { return open_slots_; }
  void seed(const std::vector<float>& counts) override { residency_.seed(counts); }
  const Residency& residency() const override { return residency_; }
  uint32_t touched_slots() override;
  CacheStats stats() const override { return stats_; }
  const Reader& reader() const override { return *reader_; }

 private:
  static constexpr uint32_t kNone = Residency::kNone;
  // Free, loading, or holding `record`. One that `goes` is free as soon as it is neither loading nor pinned.
  struct Slot {
    uint32_t record = kNone;
    bool pinned = false;     // ready to be handed out, or handed out and not released
    bool loading = false;    // a read into it is in flight
    bool goes = false;       // its record is not resident any more
    bool closed = false;     // it has no memory
    uint32_t index = kNone;  // in wanted_, of the open fetch that waits for it
  };

  Status check_request(uint32_t moe_layer, const uint32_t* experts, size_t count);
  uint32_t record_of(uint32_t index) const { return residency_.table().first_record[layer_] + wanted_[index]; }
  const ExpertRecord& place_of(uint32_t record) const {
    const uint32_t layer = residency_.table().layer_of[record];
    return config_.records[layer][record - residency_.table().first_record[layer]];
  }
  void send_away(uint32_t record);
  void take_hits(const Residency::Fetch& fetch);
  void issue();
  void issue_guesses();
  void judge_guesses();
  bool start(uint32_t record, bool may_evict);
  void submit(uint32_t slot, uint32_t record);
  void touch(uint32_t slot);
  void complete(const ReadCompletion& completion);
  Status checked(const ReadCompletion& completion, const ExpertRecord& place, uint32_t slot) const;
  void drain();
  void make_ready(uint32_t slot);
  void free_if_idle(uint32_t slot);
  uint32_t room_for(uint32_t slots) const {
    return config_.residents == 0 ? slots : std::min(slots, config_.residents);
  }
  void fit_residents(uint32_t slots);
  void close_slots(uint32_t count);
  void vacate(uint32_t slot);
  Status explain(uint32_t record, const Status& cause) const;
  uint8_t* memory(uint32_t slot) const { return config_.memory + slot * config_.slot_bytes; }

  const Config config_;
  const std::unique_ptr<Reader> reader_;
  Residency residency_;
  std::vector<uint32_t> slot_of_;   // [record], kNone = in no slot, or only passing through one
  std::vector<uint64_t> asked_in_;  // [record], the last fetch that asked for it
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;     // slots
  uint32_t open_slots_;            // neither free nor in use are the closed ones
  uint32_t lent_ = 0;              // the last so many slots
  std::vector<uint32_t> evicted_;  // scratch of resize()
  std::vector<bool> touched_;      // [slot], read into since it was opened
  uint32_t touched_slots_ = 0;
  uint32_t committed_ = 0;  // the first so many slots have been looked at for memory that they had before
  uint32_t in_flight_ = 0;  // all reads
  CacheStats stats_;

  // The open fetch.
  bool open_ = false;
  uint64_t fetch_ = 0;
  uint32_t layer_ = 0;
  std::vector<uint32_t> wanted_;  // experts, as the caller gave them
  std::vector<uint32_t> misses_;  // indices into wanted_, in order
  std::vector<ExpertRef> ready_;  // not yet handed out
  size_t issued_ = 0;             // of misses_
  size_t passing_ = 0;            // the first so many of misses_ do not stay
  size_t handed_out_ = 0;
  uint32_t awaited_ = 0;  // reads in flight for this fetch
  uint32_t pins_ = 0;
  Status failure_;

  // Guesses.
  std::vector<uint32_t> guesses_;  // records, likeliest first
  size_t guess_next_ = 0;          // of guesses_, to be looked at
  uint32_t guess_limit_ = 0;       // more reads that may begin
  std::vector<uint32_t> guessed_;  // records begun, whose layer has not had its turn since
  GuessJudge judge_;
};

}  // namespace smoe
