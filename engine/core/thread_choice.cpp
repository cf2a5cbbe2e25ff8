#include "core/thread_choice.h"

#include <utility>

namespace smoe {

void ThreadChoice::took(size_t rows, double seconds) {
  if (!is_open(rows)) return;
  Rows& r = of_rows_[rows - 1];
  r.seconds += seconds;
  ++r.passes;
  if (r.seconds < kTrySeconds) return;
  const double mean = std::exchange(r.seconds, 0) / std::exchange(r.passes, 0);
  double& known = r.mean_s[r.arm];
  known = known == 0 ? mean : (known + mean) / 2;
  const size_t other = 1 - r.arm;
  if (r.mean_s[other] == 0 || ++r.tries >= kTriesBetween) {
    r.arm = other;
    r.tries = 0;
  } else {
    r.arm = r.mean_s[0] <= r.mean_s[1] ? 0 : 1;
  }
}

}  // namespace smoe
