#include "util/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "util/cgroup.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace smoe {
namespace {

// Rounds of `relax` before a waiting thread parks: some tens of microseconds, the gap between two matrices of a layer,
// and short enough that a pool larger than the free cores does not starve the thread it waits for.
constexpr int kSpins = 1000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `word` is no longer `old`: spins, then parks.
uint32_t await_change(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    const uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    relax();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

uint32_t affinity_cpus() {
  // The kernel refuses a mask smaller than its own, so the size grows until it fits.
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(cpus);
    const int failed = sched_getaffinity(0, bytes, set);
    const int count = failed ? 0 : CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    if (count > 0) return static_cast<uint32_t>(count);
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

// What quota / period pay for.
void limit_by_quota(const std::string& quota, const std::string& period, UsableCpus* cpus) {
  uint64_t q = 0, p = 0;
  if (!parse_bytes(quota, &q) || !parse_bytes(period, &p) || q == 0 || p == 0) return;  // "max", -1
  cpus->most = static_cast<uint32_t>(std::min<uint64_t>(cpus->most, (q + p - 1) / p));
  cpus->whole = static_cast<uint32_t>(std::clamp<uint64_t>(q / p, 1, cpus->whole));
}

}  // namespace

UsableCpus usable_cpus(const std::string& root) {
  const uint32_t all = affinity_cpus();
  UsableCpus cpus{all, all};
  const CgroupFolders folders = cgroup_folders(root, "cpu");
  std::string quota, period;
  for (const std::string& folder : folders.v1) {
    if (read_small_file(folder + "/cpu.cfs_quota_us", &quota) &&
        read_small_file(folder + "/cpu.cfs_period_us", &period)) {
      limit_by_quota(quota, period, &cpus);
    }
  }
  for (const std::string& folder : folders.v2) {
    if (!read_small_file(folder + "/cpu.max", &quota)) continue;
    const size_t space = quota.find(' ');
    if (space != std::string::npos) limit_by_quota(quota.substr(0, space), quota.substr(space), &cpus);
  }
  return cpus;
}

// One job at a time. `cursor` is the job: its number in the high half, the tasks not yet claimed in the low half. A
// worker claims the next task by counting the low half down; as long as the number matches and something is left, the
// job is live and its other fields are stable, so a worker that wakes up late can never run a task of a job that has
// ended.
struct ThreadPool::Impl {
  alignas(64) std::atomic<uint64_t> cursor{0};
  alignas(64) std::atomic<uint32_t> epoch{0};  // changes with every job and at the end: what idle workers wait for
  alignas(64) std::atomic<uint32_t> done{0};   // tasks of this job that have run
  alignas(64) std::atomic<uint32_t> active;    // workers with a lower number take part; what the others wait for
  alignas(64) void* ctx = nullptr;
  Body body = nullptr;
  uint32_t tasks = 0;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  explicit Impl(uint32_t count) : active(count) {}

  // Runs tasks until none is left to claim.
  void work(size_t worker) {
    uint64_t seen = cursor.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen) != 0) {
      if (!cursor.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire)) continue;
      const uint32_t total = tasks;  // not to be read once `done` is full: the caller may be writing the next job
      body(ctx, total - static_cast<uint32_t>(seen), worker);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == total) done.notify_one();
      seen = cursor.load(std::memory_order_acquire);
    }
  }

  void loop(size_t worker) {
    uint32_t seen = 0;
    while (!stop.load(std::memory_order_acquire)) {
      const uint32_t count = active.load(std::memory_order_acquire);
      if (worker >= count) {
        active.wait(count, std::memory_order_acquire);
        continue;
      }
      work(worker);
      seen = await_change(epoch, seen);
    }
  }
};

ThreadPool::ThreadPool(uint32_t threads) : impl_(std::make_unique<Impl>(std::max(1u, threads))) {
  for (uint32_t i = 1; i < threads; ++i) impl_->threads.emplace_back([this, i] { impl_->loop(i); });
}

ThreadPool::~ThreadPool() {
  impl_->stop.store(true, std::memory_order_release);
  impl_->epoch.fetch_add(1);
  impl_->epoch.notify_all();
  use(size() + 1);  // not the number that a worker may be waiting at
  for (std::thread& thread : impl_->threads) thread.join();
}

uint32_t ThreadPool::size() const { return static_cast<uint32_t>(impl_->threads.size()) + 1; }

void ThreadPool::use(uint32_t threads) {
  if (impl_->active.load(std::memory_order_relaxed) == threads) return;  // do not wake those that sleep for every pass
  impl_->active.store(threads);
  impl_->active.notify_all();
}

void ThreadPool::run_erased(size_t tasks, void* ctx, Body body) {
  Impl& impl = *impl_;
  if (impl.active.load(std::memory_order_relaxed) <= 1 || tasks <= 1) {
    for (size_t task = 0; task < tasks; ++task) body(ctx, task, 0);
    return;
  }
  impl.ctx = ctx;
  impl.body = body;
  impl.tasks = static_cast<uint32_t>(tasks);
  impl.done.store(0, std::memory_order_relaxed);
  const uint64_t job = (impl.cursor.load(std::memory_order_relaxed) >> 32) + 1;
  impl.cursor.store(job << 32 | impl.tasks, std::memory_order_release);
  // Sequentially consistent, so that a worker about to park either sees the new epoch or is seen waiting.
  impl.epoch.fetch_add(1);
  impl.epoch.notify_all();
  impl.work(0);
  for (uint32_t done = impl.done.load(std::memory_order_acquire); done != impl.tasks;)
    done = await_change(impl.done, done);
}

}  // namespace smoe
