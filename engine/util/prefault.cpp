#include "util/prefault.h"

#include <sys/mman.h>

#include <algorithm>

namespace smoe {

void Prefault::start(uint8_t* memory, size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  const size_t most = std::min(bytes, kMost);
  thread_ = std::thread([this, memory, most] {
    constexpr size_t kStep = size_t{4} << 20;
    for (size_t at = 0; at < most && !stop_; at += kStep) {
      if (madvise(memory + at, std::min(kStep, most - at), MADV_POPULATE_WRITE) != 0) return;
      committed_ = std::min(at + kStep, most);
    }
  });
#else
  (void)memory;
  (void)bytes;
#endif
}

void Prefault::stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

}  // namespace smoe
