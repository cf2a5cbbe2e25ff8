#include "core/draft.h"

#include <algorithm>

namespace smoe {

std::span<const int32_t> NgramDraft::propose(std::span<const int32_t> history, size_t limit) {
  guess_.clear();
  limit = std::min<size_t>(limit, length_);
  if (limit == 0) return {};
  if (pause_ > 0) return --pause_, guess_;
  for (size_t n = kLongest; n >= kShortest && guess_.empty(); --n) {
    if (history.size() <= n) continue;
    const auto end = history.end(), tail = end - static_cast<ptrdiff_t>(n);
    const auto found = std::find_end(history.begin(), end - 1, tail, end);  // the latest one that something follows
    if (found == end - 1) continue;
    const auto after = found + static_cast<ptrdiff_t>(n);
    guess_.assign(after, after + std::min<ptrdiff_t>(end - after, static_cast<ptrdiff_t>(limit)));
  }
  return guess_;
}

void NgramDraft::settle(size_t accepted) {
  if (guess_.empty()) return;
  if (accepted == guess_.size()) {
    length_ = std::min(most_, length_ * 2);
    next_pause_ = 1;
  } else if (accepted == 0) {
    length_ = std::max(1u, length_ / 2);
    pause_ = next_pause_;
    next_pause_ = std::min(kLongestPause, next_pause_ * 2);
  } else {
    length_ = static_cast<uint32_t>(accepted) + 1;
    next_pause_ = 1;
  }
  guess_.clear();
}

}  // namespace smoe
