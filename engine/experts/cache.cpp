#include "experts/cache.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "experts/lru.h"
#include "util/crc32c.h"

namespace smoe {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

class LruExpertCache : public ExpertCache {
 public:
  LruExpertCache(Config config, std::unique_ptr<Reader> reader)
      : config_(std::move(config)), reader_(std::move(reader)), slots_(config_.slots), order_(config_.slots) {
    uint32_t records = 0;
    size_t widest = 0;
    for (const auto& layer : config_.records) {
      first_record_.push_back(records);
      records += static_cast<uint32_t>(layer.size());
      widest = std::max(widest, layer.size());
    }
    slot_of_.assign(records, kNone);
    asked_in_.assign(records, 0);
    wanted_.reserve(widest);
    misses_.reserve(widest);
    ready_.reserve(widest);
  }
  ~LruExpertCache() override { end(); }

  Status begin(uint32_t moe_layer, const uint32_t* experts, size_t count) override;
  Result<bool> next(std::vector<ExpertRef>* out) override;
  void release(const ExpertRef& ref) override;
  void end() override;
  CacheStats stats() const override { return stats_; }
  const Reader& reader() const override { return *reader_; }

 private:
  struct Slot {
    uint32_t record = kNone;  // resident, whole and checked
    bool pinned = false;      // ready to be handed out, or handed out and not released
    bool loading = false;     // a read into it is in flight
    uint32_t index = 0;       // of the expert it is loading, in wanted_
  };

  Status check_request(uint32_t moe_layer, const uint32_t* experts, size_t count);
  uint32_t record_of(uint32_t index) const { return first_record_[layer_] + wanted_[index]; }
  uint32_t take_victim();
  void issue();
  void complete(const ReadCompletion& completion);
  void drain();
  void make_ready(uint32_t index, uint32_t slot);
  Status explain(uint32_t index, const Status& cause) const;
  uint8_t* memory(uint32_t slot) const { return config_.memory + slot * config_.slot_bytes; }

  const Config config_;
  const std::unique_ptr<Reader> reader_;
  std::vector<uint32_t> first_record_;  // [moe layer], into the two below
  std::vector<uint32_t> slot_of_;       // [record], kNone = not resident
  std::vector<uint64_t> asked_in_;      // [record], the last fetch that asked for it
  std::vector<Slot> slots_;
  LruList order_;
  CacheStats stats_;

  // The open fetch.
  bool open_ = false;
  uint64_t fetch_ = 0;
  uint32_t layer_ = 0;
  std::vector<uint32_t> wanted_;  // experts, as the caller gave them
  std::vector<uint32_t> misses_;  // indices into wanted_, in order
  std::vector<ExpertRef> ready_;  // not yet handed out
  size_t issued_ = 0;             // of misses_
  size_t handed_out_ = 0;
  uint32_t in_flight_ = 0;
  uint32_t busy_slots_ = 0;  // pinned or loading
  Status failure_;
};

Status LruExpertCache::check_request(uint32_t moe_layer, const uint32_t* experts, size_t count) {
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
    uint64_t& asked = asked_in_[first_record_[moe_layer] + experts[i]];
    if (asked == fetch_) return refused(experts[i], " was asked for twice");
    asked = fetch_;
  }
  return Status::ok();
}

Status LruExpertCache::begin(uint32_t moe_layer, const uint32_t* experts, size_t count) {
  SMOE_TRY(check_request(moe_layer, experts, count));
  open_ = true;
  layer_ = moe_layer;
  wanted_.assign(experts, experts + count);
  misses_.clear();
  ready_.clear();
  issued_ = handed_out_ = 0;
  failure_ = Status::ok();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t slot = slot_of_[record_of(i)];
    if (slot == kNone) {
      misses_.push_back(i);
      ++stats_.misses;
      continue;
    }
    ++stats_.hits;
    order_.make_most_recent(slot);
    make_ready(i, slot);
    ++busy_slots_;
  }
  issue();
  return Status::ok();
}

void LruExpertCache::make_ready(uint32_t index, uint32_t slot) {
  slots_[slot].pinned = true;
  ready_.push_back({wanted_[index], index, memory(slot), slot});
}

// The least recently used slot that is free to go, emptied; kNone if every slot is busy.
uint32_t LruExpertCache::take_victim() {
  if (busy_slots_ == config_.slots) return kNone;
  uint32_t slot = order_.first();
  while (slots_[slot].pinned || slots_[slot].loading) slot = order_.next(slot);
  if (slots_[slot].record != kNone) {
    slot_of_[slots_[slot].record] = kNone;
    slots_[slot].record = kNone;
    ++stats_.evictions;
  }
  return slot;
}

void LruExpertCache::issue() {
  while (open_ && failure_.is_ok() && issued_ < misses_.size() && in_flight_ < config_.depth) {
    const uint32_t slot = take_victim();
    if (slot == kNone) break;
    const uint32_t index = misses_[issued_++];
    const ExpertRecord& record = config_.records[layer_][wanted_[index]];
    slots_[slot].loading = true;
    slots_[slot].index = index;
    order_.make_most_recent(slot);
    ++busy_slots_;
    ++in_flight_;
    reader_->submit({record.offset, static_cast<size_t>(record.length), memory(slot), slot});
  }
  reader_->flush();
}

void LruExpertCache::complete(const ReadCompletion& completion) {
  const uint32_t slot = static_cast<uint32_t>(completion.tag);
  const uint32_t index = slots_[slot].index;
  const ExpertRecord& record = config_.records[layer_][wanted_[index]];
  --in_flight_;
  slots_[slot].loading = false;
  Status status = completion.status;
  if (status.is_ok()) {
    stats_.read_bytes += record.length;
    if (config_.verify_reads && crc32c(memory(slot), record.length) != record.crc32c) {
      status = {Code::corrupt, "the record at offset " + std::to_string(record.offset) + " does not match its checksum",
                "run `smoe verify` on the model, then convert or copy it again"};
    }
  }
  if (!status.is_ok()) {
    order_.make_least_recent(slot);
    --busy_slots_;
    if (failure_.is_ok()) failure_ = explain(index, status);
    return;
  }
  slots_[slot].record = record_of(index);
  slot_of_[record_of(index)] = slot;
  make_ready(index, slot);
}

Status LruExpertCache::explain(uint32_t index, const Status& cause) const {
  const ExpertRecord& record = config_.records[layer_][wanted_[index]];
  return {
      cause.code(),
      "layer " + std::to_string(record.layer) + ", expert " + std::to_string(wanted_[index]) + ": " + cause.message(),
      cause.hint()};
}

// Takes in what has arrived, without waiting, and keeps the disk busy.
void LruExpertCache::drain() {
  ReadCompletion completion;
  while (in_flight_ > 0 && reader_->poll(&completion)) {
    complete(completion);
    issue();
  }
}

Result<bool> LruExpertCache::next(std::vector<ExpertRef>* out) {
  if (!open_) return Status(Code::failed, "expert cache: next() without begin()");
  issue();
  drain();
  while (ready_.empty() && failure_.is_ok() && handed_out_ < wanted_.size()) {
    if (in_flight_ == 0) {
      return Status(Code::failed, "expert cache: all " + std::to_string(config_.slots) +
                                      " slots are held by the caller and more experts are to come");
    }
    const auto since = std::chrono::steady_clock::now();
    complete(reader_->wait());
    stats_.wait_ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
    issue();
  }
  if (!failure_.is_ok()) return failure_;
  if (ready_.empty()) return false;
  out->insert(out->end(), ready_.begin(), ready_.end());
  handed_out_ += ready_.size();
  ready_.clear();
  return true;
}

void LruExpertCache::release(const ExpertRef& ref) {
  if (ref.slot >= slots_.size() || !slots_[ref.slot].pinned) return;
  slots_[ref.slot].pinned = false;
  --busy_slots_;
  drain();
  issue();
}

void LruExpertCache::end() {
  open_ = false;  // nothing more is issued
  while (in_flight_ > 0) complete(reader_->wait());
  if (busy_slots_ > 0) {  // pins that the caller did not release, as after an error
    for (Slot& slot : slots_) slot.pinned = false;
    busy_slots_ = 0;
  }
  ready_.clear();
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
  return std::unique_ptr<ExpertCache>(std::make_unique<LruExpertCache>(std::move(config), std::move(reader)));
}

}  // namespace smoe
