#include "core/conversation.h"

namespace smoe {

uint32_t Conversation::reuse(const std::vector<int32_t>& ids) {
  const size_t limit = std::min(held_.size(), ids.size() - 1);
  size_t common = 0;
  while (common < limit && held_[common] == ids[common]) ++common;
  if (!kv_.recurrent().empty()) common = kv_.recurrent().reachable(common);
  if (common == 0 || !kv_.can_roll_back(written_, common)) {
    clear();
  } else {
    held_.resize(common);
    if (!kv_.recurrent().empty()) kv_.recurrent().go_to(common);
  }
  if (!kv_.recurrent().empty()) kv_.recurrent().begin_turn(ids.size());
  return static_cast<uint32_t>(held_.size());
}

void Conversation::keep_prefix_of(const std::vector<int32_t>& ids) {
  const size_t n = std::min(held_.size(), ids.size());
  held_.resize(static_cast<size_t>(std::mismatch(held_.begin(), held_.begin() + n, ids.begin()).first - held_.begin()));
  kv_.recurrent().cut(held_.size());
}

bool Conversation::can_take_back(size_t n) const {
  if (n > 0 && !kv_.recurrent().empty()) return false;
  const uint64_t next = held_.size() + 1;
  return kv_.can_roll_back(std::max(written_, next + n), next);
}

void Conversation::clear() {
  held_.clear();
  written_ = 0;
  if (!kv_.recurrent().empty()) kv_.recurrent().go_to(0);
}

}  // namespace smoe
