// How many slots there are, which of them have memory, and which are lent.
#include <cstring>
#include <functional>

#include "experts/slot_cache.h"

namespace smoe {

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

}  // namespace smoe
