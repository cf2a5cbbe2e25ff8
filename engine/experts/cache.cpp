#include "experts/cache.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "experts/slot_cache.h"
#include "util/crc32c.h"

namespace smoe {

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

void SlotCache::submit(uint32_t slot, uint32_t record) {
  slots_[slot].record = record;
  slots_[slot].loading = true;
  touch(slot);
  ++in_flight_;
  const ExpertRecord& place = place_of(record);
  reader_->submit({place.offset, static_cast<size_t>(place.length), memory(slot), slot});
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

namespace {

ExpertTable table_of(const ExpertCache::Config& config) {
  std::vector<uint32_t> experts;
  for (const auto& layer : config.records) experts.push_back(static_cast<uint32_t>(layer.size()));
  return ExpertTable(experts);
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
