#include "util/memory_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "util/aligned_buffer.h"
#include "util/threads.h"

namespace smoe {
namespace {

constexpr size_t kBytes = 256u << 20;  // several times a last-level cache
constexpr size_t kTask = 2u << 20;

// Sixteen running sums, so that the additions do not wait for each other.
uint64_t sum(const uint64_t* words, size_t count) {
  uint64_t sums[16] = {};
  for (size_t i = 0; i < count; i += 16) {
    for (size_t lane = 0; lane < 16; ++lane) sums[lane] += words[i + lane];
  }
  uint64_t total = 0;
  for (const uint64_t lane : sums) total += lane;
  return total;
}

}  // namespace

Result<double> probe_memory(uint32_t threads, double seconds) {
  using Clock = std::chrono::steady_clock;
  SMOE_ASSIGN(AlignedBuffer memory, AlignedBuffer::allocate(kBytes));
  std::memset(memory.data(), 1, kBytes);  // untouched pages would all be the one page of zeros
  ThreadPool pool(threads);
  std::vector<uint64_t> totals(kBytes / kTask);
  const auto stop = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  double best = 0;
  do {
    const auto start = Clock::now();
    pool.run(totals.size(), [&](size_t task, size_t) {
      totals[task] = sum(reinterpret_cast<const uint64_t*>(memory.data() + task * kTask), kTask / sizeof(uint64_t));
    });
    best = std::max(best, kBytes / std::chrono::duration<double>(Clock::now() - start).count());
  } while (Clock::now() < stop);
  // The sums are known (every byte is 1); using them keeps the compiler from dropping the reads.
  for (const uint64_t total : totals) {
    if (total != kTask / sizeof(uint64_t) * 0x0101010101010101ull)
      return Status(Code::failed, "memory probe: a sum is wrong");
  }
  return best;
}

}  // namespace smoe
