#include <chrono>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include "check.h"
#include "util/aligned_buffer.h"
#include "util/prefault.h"

using namespace smoe;

namespace {

uint64_t resident_pages() {
  std::ifstream file("/proc/self/statm");
  uint64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident;
}

}  // namespace

TEST(prefault_commits_and_keeps_what_is_there) {
  constexpr size_t kBytes = size_t{64} << 20;
  AlignedBuffer memory = std::move(AlignedBuffer::allocate(kBytes)).value();
  memory.data()[5] = 7;
  const uint64_t before = resident_pages();
  Prefault prefault;
  prefault.start(memory.data(), kBytes);
  for (int i = 0; i < 500 && resident_pages() < before + kBytes / 4096 / 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  prefault.stop();
#ifdef __SANITIZE_THREAD__
  return;  // shadow memory hides the figure
#endif
  if (resident_pages() < before + kBytes / 4096 / 2) {
    std::cerr << "SKIP prefault_commits_and_keeps_what_is_there: this kernel does not commit on demand\n";
  }
  CHECK_EQ(memory.data()[5], 7);
  CHECK_EQ(memory.data()[kBytes - 1], 0);
}

TEST(prefault_stops_early_and_twice) {
  AlignedBuffer memory = std::move(AlignedBuffer::allocate(size_t{256} << 20)).value();
  Prefault prefault;
  prefault.stop();
  Prefault second;
  second.start(memory.data(), memory.size());
  second.stop();
  second.stop();
  memory.discard(0, memory.size());
  CHECK_EQ(memory.data()[0], 0);
}
