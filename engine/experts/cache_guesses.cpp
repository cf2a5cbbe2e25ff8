// What is read without having been asked for: on a guess, or to warm the cache.
#include "experts/slot_cache.h"

namespace smoe {

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

}  // namespace smoe
