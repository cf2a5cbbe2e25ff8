#include "experts/cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "util/crc32c.h"

namespace smoe {
namespace {

constexpr uint32_t kNone = Residency::kNone;

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

ExpertTable table_of(const ExpertCache::Config& config) {
  std::vector<uint32_t> experts;
  for (const auto& layer : config.records) experts.push_back(static_cast<uint32_t>(layer.size()));
  return ExpertTable(experts);
}

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

Status SlotCache::check_request(uint32_t moe_layer, const uint32_t* experts, size_t count) {
  if (open_) return {Code::failed, "expert cache: the last fetch was not ended"};
  if (moe_layer >= config_.records.size()) {
    return {Code::failed, "expert cache: there is no MoE layer " + std::to_string(moe_layer)};
  }
  const auto refused = [&](uint32_t expert, const char* why) {
    return Status(Code::failed, "expert cache: expert " + std::to_string(expert) + " of MoE layer " +
                                    std::to_string(moe_layer) + why);
  };
  ++fetch_;
  for (size_t i = 0; i < count; ++i) {
    if (experts[i] >= config_.records[moe_layer].size()) return refused(experts[i], " does not exist");
    uint64_t& asked = asked_in_[residency_.table().first_record[moe_layer] + experts[i]];
    if (asked == fetch_) return refused(experts[i], " was asked for twice");
    asked = fetch_;
  }
  return Status::ok();
}

Status SlotCache::begin(uint32_t moe_layer, const uint32_t* experts, size_t count, const uint32_t* uses,
                        uint32_t tokens) {
  SMOE_TRY(check_request(moe_layer, experts, count));
  drain();
  open_ = true;
  layer_ = moe_layer;
  judge_guesses();
  wanted_.assign(experts, experts + count);
  ready_.clear();
  issued_ = handed_out_ = 0;
  failure_ = Status::ok();
  const Residency::Fetch& fetch = residency_.fetch(moe_layer, experts, uses, count, tokens);
  stats_.hits += fetch.hits.size();
  stats_.misses += fetch.misses.size();
  stats_.evictions += fetch.evicted.size() + fetch.passing;
  for (uint32_t record : fetch.evicted) send_away(record);
  take_hits(fetch);
  misses_.assign(fetch.misses.begin(), fetch.misses.end());
  passing_ = fetch.passing - std::min<size_t>(fetch.passing, fetch.hits.size());
  issue();
  return Status::ok();
}

// What was guessed of the layer that begins has come true or not.
void SlotCache::judge_guesses() {
  judge_.next_fetch();
  std::erase_if(guessed_, [&](uint32_t record) {
    if (residency_.table().layer_of[record] != layer_) return false;
    const bool right = asked_in_[record] == fetch_ && residency_.holds(record);
    stats_.guessed_right += right;
    judge_.judge(right);
    return true;
  });
  if (!guesses_.empty() && residency_.table().layer_of[guesses_[0]] == layer_) guesses_.clear();
  guess_next_ = std::min(guess_next_, guesses_.size());
}

void SlotCache::take_hits(const Residency::Fetch& fetch) {
  for (size_t i = 0; i < fetch.hits.size(); ++i) {
    const uint32_t record = record_of(fetch.hits[i]), slot = slot_of_[record];
    slots_[slot].index = fetch.hits[i];
    if (i < fetch.passing) {
      slots_[slot].goes = true;
      slot_of_[record] = kNone;
    }
    if (slots_[slot].loading) {
      ++awaited_;  // a load that nobody waited for until now
    } else {
      make_ready(slot);
    }
  }
}

void SlotCache::send_away(uint32_t record) {
  const uint32_t slot = std::exchange(slot_of_[record], kNone);
  slots_[slot].goes = true;
  free_if_idle(slot);
}

void SlotCache::free_if_idle(uint32_t slot) {
  if (!slots_[slot].goes || slots_[slot].loading || slots_[slot].pinned) return;
  slots_[slot] = {};
  free_.push_back(slot);
}

void SlotCache::make_ready(uint32_t slot) {
  const uint32_t index = std::exchange(slots_[slot].index, kNone);
  slots_[slot].pinned = true;
  ++pins_;
  ready_.push_back({wanted_[index], index, memory(slot), slot});
}

void SlotCache::issue() {
  while (open_ && failure_.is_ok() && issued_ < misses_.size() && in_flight_ < config_.depth && !free_.empty()) {
    const uint32_t slot = free_.back(), index = misses_[issued_], record = record_of(index);
    free_.pop_back();
    slots_[slot].goes = issued_ < passing_;
    slots_[slot].index = index;
    if (!slots_[slot].goes) slot_of_[record] = slot;
    ++issued_;
    ++awaited_;
    submit(slot, record);
  }
  issue_guesses();
  reader_->flush();
}

// Not behind the last read of the fetch: a virtual disk was seen to announce what it has read only when its queue runs
// empty.
void SlotCache::issue_guesses() {
  if (open_ && (issued_ < misses_.size() || awaited_ > 0 || !failure_.is_ok())) return;
  if (!judge_.allows()) return;
  for (; guess_next_ < guesses_.size() && guess_limit_ > 0; ++guess_next_) {
    const uint32_t record = guesses_[guess_next_];
    if (residency_.holds(record)) continue;
    if (!start(record, true)) return;
    guessed_.push_back(record);
    --guess_limit_;
    ++stats_.guessed;
  }
}

void SlotCache::prefetch(uint32_t moe_layer, const uint32_t* experts, size_t count, uint32_t most) {
  guesses_.clear();
  guess_next_ = 0;
  guess_limit_ = most;
  if (moe_layer >= config_.records.size()) return;
  const ExpertTable& table = residency_.table();
  for (size_t i = 0; i < count; ++i)
    if (experts[i] < config_.records[moe_layer].size()) guesses_.push_back(table.first_record[moe_layer] + experts[i]);
  issue_guesses();
  reader_->flush();
}

void SlotCache::submit(uint32_t slot, uint32_t record) {
  slots_[slot].record = record;
  slots_[slot].loading = true;
  touch(slot);
  ++in_flight_;
  const ExpertRecord& place = place_of(record);
  reader_->submit({place.offset, static_cast<size_t>(place.length), memory(slot), slot});
}

void SlotCache::touch(uint32_t slot) {
  if (!touched_[slot]) ++touched_slots_;
  touched_[slot] = true;
}

uint32_t SlotCache::touched_slots() {
  const uint64_t committed = config_.committed ? config_.committed() / config_.slot_bytes : 0;
  for (; committed_ < std::min<uint64_t>(committed, config_.slots); ++committed_)
    if (!slots_[committed_].closed) touch(committed_);
  return touched_slots_;
}

void SlotCache::complete(const ReadCompletion& completion) {
  const uint32_t slot = static_cast<uint32_t>(completion.tag);
  const uint32_t record = slots_[slot].record;
  const bool awaited = slots_[slot].index != kNone;
  --in_flight_;
  if (awaited) --awaited_;
  slots_[slot].loading = false;
  const ExpertRecord& place = place_of(record);
  const Status status = checked(completion, place, slot);
  if (completion.status.is_ok()) stats_.read_bytes += place.length;
  if (!status.is_ok()) {
    if (!slots_[slot].goes) {
      residency_.drop(record);
      slot_of_[record] = kNone;
      slots_[slot].goes = true;
    }
    free_if_idle(slot);
    if (awaited && failure_.is_ok()) failure_ = explain(record, status);
  } else if (awaited && open_) {
    make_ready(slot);
  } else {
    slots_[slot].index = kNone;
    free_if_idle(slot);
  }
}

Status SlotCache::checked(const ReadCompletion& completion, const ExpertRecord& place, uint32_t slot) const {
  if (!completion.status.is_ok()) return completion.status;
  if (!config_.verify_reads && !reader_->changed()) return completion.status;
  if (crc32c(memory(slot), place.length) == place.crc32c) return Status::ok();
  return {Code::corrupt, "the record at offset " + std::to_string(place.offset) + " does not match its checksum",
          "run `smoe verify` on the model, then convert or copy it again"};
}

Status SlotCache::explain(uint32_t record, const Status& cause) const {
  const uint32_t layer = residency_.table().layer_of[record];
  return {cause.code(),
          "layer " + std::to_string(place_of(record).layer) + ", expert " +
              std::to_string(record - residency_.table().first_record[layer]) + ": " + cause.message(),
          cause.hint()};
}

// Takes in what has arrived, without waiting, and keeps the disk busy.
void SlotCache::drain() {
  ReadCompletion completion;
  while (in_flight_ > 0 && reader_->poll(&completion)) {
    complete(completion);
    issue();
  }
}

Result<bool> SlotCache::next(std::vector<ExpertRef>* out) {
  if (!open_) return Status(Code::failed, "expert cache: next() without begin()");
  issue();
  drain();
  while (ready_.empty() && failure_.is_ok() && handed_out_ < wanted_.size()) {
    if (in_flight_ == 0) {
      return Status(Code::failed, "expert cache: all " + std::to_string(residency_.slots()) +
                                      " slots are held by the caller and more experts are to come");
    }
    const auto since = std::chrono::steady_clock::now();
    complete(reader_->wait());
    stats_.wait_ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
    issue();
    drain();  // what came with it is computed with it
  }
  if (!failure_.is_ok()) return failure_;
  if (ready_.empty()) return false;
  out->insert(out->end(), ready_.begin(), ready_.end());
  handed_out_ += ready_.size();
  ready_.clear();
  return true;
}

void SlotCache::release(const ExpertRef& ref) {
  if (ref.slot >= slots_.size() || !slots_[ref.slot].pinned) return;
  slots_[ref.slot].pinned = false;
  --pins_;
  free_if_idle(ref.slot);
  drain();
  issue();
}

void SlotCache::end() {
  if (!open_) return;
  open_ = false;  // nothing more is issued
  while (awaited_ > 0) complete(reader_->wait());
  for (size_t i = std::max(issued_, passing_); i < misses_.size(); ++i) residency_.drop(record_of(misses_[i]));
  for (uint32_t slot = 0; pins_ > 0 && slot < slots_.size(); ++slot) {  // what was not released, as after an error
    if (!slots_[slot].pinned) continue;
    slots_[slot].pinned = false;
    --pins_;
    free_if_idle(slot);
  }
  ready_.clear();
}

bool SlotCache::load(uint32_t moe_layer, uint32_t expert, bool may_evict) {
  if ((open_ && issued_ < misses_.size()) || in_flight_ >= config_.depth) return false;
  if (moe_layer >= config_.records.size() || expert >= config_.records[moe_layer].size()) return false;
  if (!start(residency_.table().first_record[moe_layer] + expert, may_evict)) return false;
  reader_->flush();
  return true;
}

// Reads a record that nobody has asked for, if residency allows it.
bool SlotCache::start(uint32_t record, bool may_evict) {
  uint32_t evicted = kNone;
  if (!residency_.insert(record, may_evict, &evicted)) return false;
  if (evicted != kNone) {
    ++stats_.evictions;
    send_away(evicted);
  }
  while (free_.empty()) complete(reader_->wait());  // a slot is due, but its record left while it was being read
  const uint32_t slot = free_.back();
  free_.pop_back();
  slot_of_[record] = slot;
  submit(slot, record);
  return true;
}

uint32_t SlotCache::settle(bool wait) {
  if (wait && in_flight_ > 0) complete(reader_->wait());
  drain();
  return in_flight_;
}

void SlotCache::resize(uint32_t slots) {
  if (open_ || slots <= lent_ || slots > config_.slots) return;
  fit_residents(slots - lent_);
  if (slots < open_slots_) close_slots(open_slots_ - slots);
  for (uint32_t slot = config_.slots - lent_; slot-- > 0 && open_slots_ < slots;) {
    if (!slots_[slot].closed) continue;
    slots_[slot].closed = false;
    free_.push_back(slot);
    ++open_slots_;
  }
}

// At most so many records are resident from now on, each of them in a slot and all other slots free.
void SlotCache::fit_residents(uint32_t slots) {
  while (in_flight_ > 0) complete(reader_->wait());
  evicted_.clear();
  residency_.resize(room_for(slots), &evicted_);
  stats_.evictions += evicted_.size();
  for (uint32_t record : evicted_) send_away(record);
}

// Of the free slots those with the lowest numbers, because the last ones are to be lent.
void SlotCache::close_slots(uint32_t count) {
  std::sort(free_.begin(), free_.end(), std::greater<>());
  for (; count > 0 && !free_.empty(); --count, --open_slots_) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    slots_[slot].closed = true;
    if (touched_[slot]) --touched_slots_;
    touched_[slot] = false;
    reader_->forget(memory(slot), config_.slot_bytes);
    if (config_.discard) config_.discard(slot * config_.slot_bytes, config_.slot_bytes);
  }
}

uint8_t* SlotCache::lend(uint32_t slots) {
  if (open_ || slots >= open_slots_) return nullptr;
  const uint32_t begin = config_.slots - slots, begin_before = config_.slots - lent_;
  fit_residents(open_slots_ - slots);
  for (uint32_t slot = begin_before; slot < begin; ++slot) free_.push_back(slot);  // taken back
  std::erase_if(free_, [&](uint32_t slot) { return slot >= begin; });
  uint32_t closed = 0;  // whose memory the borrower will use all the same
  for (uint32_t slot = begin; slot < begin_before; ++slot) {
    closed += std::exchange(slots_[slot].closed, false);
    vacate(slot);
    touch(slot);
  }
  lent_ = slots;
  open_slots_ += closed;
  close_slots(closed);
  return memory(begin);
}

// Moves what lies in the slot into a free one.
void SlotCache::vacate(uint32_t slot) {
  const uint32_t record = slots_[slot].record;
  if (record == kNone) return;
  const uint32_t to = free_.back();
  free_.pop_back();
  std::memcpy(memory(to), memory(slot), place_of(record).length);
  slots_[to] = std::exchange(slots_[slot], {});
  slot_of_[record] = to;
  touch(to);
}

Status check_config(const ExpertCache::Config& config) {
  if (config.records.empty()) return Status::ok();  // a dense model: nothing will be asked for
  const auto unusable = [](const std::string& what) { return Status(Code::usage, "expert cache: " + what); };
  if (config.slots == 0 || config.memory == nullptr) return unusable("there are no slots");
  if (config.depth == 0) return unusable("depth must be at least 1");
  if (config.slot_bytes % kIoAlignment != 0 || reinterpret_cast<uintptr_t>(config.memory) % kIoAlignment != 0) {
    return unusable("slots are not aligned to " + std::to_string(kIoAlignment) + " bytes");
  }
  for (const auto& layer : config.records) {
    for (const ExpertRecord& record : layer) {
      if (record.length > config.slot_bytes) {
        return unusable("a record of " + std::to_string(record.length) + " bytes does not fit a slot of " +
                        std::to_string(config.slot_bytes));
      }
    }
  }
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<ExpertCache>> ExpertCache::create(Config config, std::unique_ptr<Reader> reader) {
  SMOE_TRY(check_config(config));
  ExpertTable table = table_of(config);
  SMOE_ASSIGN(std::unique_ptr<Policy> policy, make_policy(config.policy, table));
  return std::unique_ptr<ExpertCache>(
      std::make_unique<SlotCache>(std::move(config), std::move(reader), std::move(table), std::move(policy)));
}

}  // namespace smoe
