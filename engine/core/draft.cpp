#include "core/draft.h"

#include <algorithm>

namespace smoe {

std::span<const int32_t> NgramDraft::propose(std::span<const int32_t> history, size_t limit) {
  guess_.clear();
  limit = std::min<size_t>(limit, length_);
  if (limit == 0) return {};
  if (pause_ > 0) return --pause_, guess_;
  // The latest of the longest matches that something follows.
  size_t longest = kShortest - 1, after = 0;
  const size_t size = history.size();
  for (size_t end = size - std::min<size_t>(size, 1); end > 0 && longest < kLongest; --end) {
    size_t n = 0;
    while (n < kLongest && n < end && history[end - 1 - n] == history[size - 1 - n]) ++n;
    if (n > longest) longest = n, after = end;
  }
  if (longest < kShortest) return guess_;
  const auto from = history.begin() + static_cast<ptrdiff_t>(after);
  guess_.assign(from, from + static_cast<ptrdiff_t>(std::min(size - after, limit)));
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

void DraftJudge::took(size_t rows, size_t tokens, double seconds) {
  if (rows == 1) {
    one_s_ = passes_alone_ == 0 ? seconds : one_s_ + (seconds - one_s_) * kWeight;
    passes_alone_ = std::min(passes_alone_ + 1, kKnown);
    if (pause_ > 0) --pause_;
    return;
  }
  if (passes_alone_ == 0) return;
  const double won = static_cast<double>(tokens) - seconds / one_s_;
  balance_ += (won - balance_) * kWeight;
  if (balance_ > kEnough) next_pause_ = kFirstPause;
  if (balance_ >= -kEnough) return;
  balance_ = 0;
  pause_ = next_pause_;
  next_pause_ = std::min(kLongestPause, next_pause_ * 2);
}

}  // namespace smoe
