#include "core/conversation.h"

namespace smoe {

uint32_t Conversation::reuse(const std::vector<int32_t>& ids) {
  const size_t limit = std::min(held_.size(), ids.size() - 1);
  size_t common = 0;
  while (common < limit && held_[common] == ids[common]) ++common;
  if (common == 0 || !kv_.can_roll_back(written_, common)) {
    clear();
    return 0;
  }
  held_.resize(common);
  return static_cast<uint32_t>(common);
}

void Conversation::keep_prefix_of(const std::vector<int32_t>& ids) {
  const size_t n = std::min(held_.size(), ids.size());
  held_.resize(static_cast<size_t>(std::mismatch(held_.begin(), held_.begin() + n, ids.begin()).first - held_.begin()));
}

bool Conversation::can_take_back(size_t n) const {
  const uint64_t next = held_.size() + 1;
  return kv_.can_roll_back(std::max(written_, next + n), next);
}

void Conversation::clear() {
  held_.clear();
  written_ = 0;
}

}  // namespace smoe
