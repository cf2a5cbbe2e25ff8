#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/thread_choice.h"
#include "fake_tree.h"
#include "util/aligned_buffer.h"
#include "util/threads.h"

using namespace smoe;

TEST(threads_each_task_runs_once) {
  for (uint32_t size : {1u, 2u, 3u, 8u}) {
    ThreadPool pool(size);
    CHECK_EQ(pool.size(), size);
    for (size_t tasks : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> runs(tasks);
      std::atomic<bool> worker_in_range{true};
      pool.run(tasks, [&](size_t task, size_t worker) {
        ++runs[task];
        if (worker >= size) worker_in_range = false;
      });
      for (size_t i = 0; i < tasks; ++i) CHECK_EQ(runs[i].load(), 1);
      CHECK(worker_in_range.load());
    }
  }
}

// Jobs of changing size back to back: a worker that wakes late must not run a task of a job that has ended, which would
// write into a vector that no longer exists.
TEST(threads_many_small_jobs) {
  ThreadPool pool(4);
  for (int job = 0; job < 20000; ++job) {
    std::vector<int> values(static_cast<size_t>(job % 5 + 1), 0);
    pool.run(values.size(), [&](size_t task, size_t) { values[task] += static_cast<int>(task) + job; });
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] != static_cast<int>(i) + job) return check::fail(__FILE__, __LINE__, "a task ran twice or never");
    }
  }
}

TEST(threads_wake_after_parking) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> sum{0};
    pool.run(10, [&](size_t task, size_t) { sum += static_cast<int>(task); });
    CHECK_EQ(sum.load(), 45);
  }
}

TEST(threads_workers_share_the_work) {
  ThreadPool pool(2);
  std::atomic<int> by_worker[2] = {};
  // Each task waits for the other worker to have come, so the job ends only if both take part.
  pool.run(2, [&](size_t, size_t worker) {
    ++by_worker[worker];
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while ((by_worker[0] == 0 || by_worker[1] == 0) && std::chrono::steady_clock::now() < limit)
      std::this_thread::yield();
  });
  CHECK_EQ(by_worker[0].load(), 1);
  CHECK_EQ(by_worker[1].load(), 1);
}

TEST(threads_as_many_as_are_used) {
  ThreadPool pool(3);
  const auto workers = [&] {
    std::atomic<uint32_t> most = 0;
    for (int round = 0; round < 200; ++round)
      pool.run(32, [&](size_t, size_t worker) {
        for (uint32_t seen = most; seen < worker && !most.compare_exchange_weak(seen, static_cast<uint32_t>(worker));) {
        }
      });
    return most + 1;
  };
  for (const uint32_t threads : {1u, 2u, 3u, 1u, 3u, 2u}) {
    pool.use(threads);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // some have parked
    std::vector<std::atomic<int>> ran(100);
    pool.run(ran.size(), [&](size_t task, size_t) { ++ran[task]; });
    for (const auto& times : ran) CHECK_EQ(times.load(), 1);
    CHECK(workers() <= threads);
  }
  CHECK_EQ(pool.size(), 3u);
}

// How often the process's threads, this one aside, have gone to sleep.
uint64_t times_slept() {
  uint64_t all = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(getpid())) continue;
    std::ifstream status(task.path() / "status");
    for (std::string word; status >> word;) {
      uint64_t count = 0;
      if (word == "voluntary_ctxt_switches:" && status >> count) all += count;
    }
  }
  return all;
}

TEST(threads_that_are_not_used_sleep_on) {
  ThreadPool pool(3);
  pool.use(2);
  pool.run(2, [](size_t, size_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const uint64_t before = times_slept();
  for (int pass = 0; pass < 500; ++pass) {
    pool.use(2);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  CHECK(times_slept() < before + 50);
}

TEST(threads_choice_keeps_what_is_faster) {
  ThreadChoice choice(2, 1);
  double one = 0.01, two = 0.014;  // seconds of a pass
  const auto run = [&](size_t rows, int passes) {
    int with_one = 0;
    for (int i = 0; i < passes; ++i) {
      const uint32_t threads = choice.threads(rows);
      with_one += threads == 1;
      choice.took(rows, threads == 1 ? one : two);
    }
    return with_one;
  };
  CHECK_EQ(choice.threads(1), 2u);
  run(1, 100);  // both have been tried
  CHECK_EQ(choice.threads(1), 1u);
  CHECK(run(1, 3000) > 2800);
  one = 0.03;  // as when the other experts have been read: it is found out
  run(1, 3000);
  CHECK_EQ(choice.threads(1), 2u);
  CHECK(run(1, 3000) < 200);
  CHECK_EQ(choice.threads(9), 2u);  // arithmetic binds
  CHECK_EQ(choice.threads(2), 2u);  // as many rows are on their own
  ThreadChoice none(2, 2);
  none.took(1, 9.0);
  CHECK_EQ(none.threads(1), 2u);
}

TEST(threads_quota_limits) {
  FakeTree tree;
  CHECK(usable_threads(tree.root()) >= 1);  // no cgroup at all: the affinity mask
  tree.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  tree.write("proc/self/cgroup", "0::/a/b\n");
  tree.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  const uint32_t all = usable_threads(tree.root());
  CHECK(all >= 1);
  tree.write("sys/fs/cgroup/a/cpu.max", "100000 100000\n");
  CHECK_EQ(usable_threads(tree.root()), 1u);
  tree.write("sys/fs/cgroup/a/cpu.max", "40000 100000\n");  // less than one CPU is still one thread
  CHECK_EQ(usable_threads(tree.root()), 1u);
  CHECK_EQ(usable_cpus(tree.root()).whole, 1u);
  tree.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  CHECK_EQ(usable_cpus(tree.root()).most, std::min(all, 2u));
  CHECK_EQ(usable_cpus(tree.root()).whole, 1u);
  tree.write("sys/fs/cgroup/a/cpu.max", "100000000 100000\n");  // more than there are
  CHECK_EQ(usable_cpus(tree.root()).most, all);
  CHECK_EQ(usable_cpus(tree.root()).whole, all);
}

TEST(threads_quota_limits_v1) {
  FakeTree tree;
  tree.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n");
  tree.write("proc/self/cgroup", "4:cpu,cpuacct:/a\n");
  tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n");
  tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  CHECK(usable_threads(tree.root()) >= 1);
  const uint32_t all = usable_threads(tree.root());
  tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "100000\n");
  CHECK_EQ(usable_threads(tree.root()), 1u);
  tree.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "150000\n");
  CHECK_EQ(usable_cpus(tree.root()).most, std::min(all, 2u));
  CHECK_EQ(usable_cpus(tree.root()).whole, 1u);
}

TEST(aligned_buffer_is_aligned_and_zeroed) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{100000}, AlignedBuffer::kHugePage + 1}) {
    Result<AlignedBuffer> made = AlignedBuffer::allocate(bytes);
    REQUIRE(made.is_ok());
    AlignedBuffer buffer = std::move(made).value();
    CHECK_EQ(buffer.size(), bytes);
    CHECK_EQ(buffer.data() == nullptr, bytes == 0);
    if (bytes == 0) continue;
    const size_t alignment = bytes >= AlignedBuffer::kHugePage ? AlignedBuffer::kHugePage : AlignedBuffer::kPage;
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u);
    CHECK_EQ(int{buffer.data()[0]} + int{buffer.data()[bytes - 1]}, 0);
    std::memset(buffer.data(), 7, bytes);
  }
}

TEST(aligned_buffer_moves_and_discards) {
  AlignedBuffer first = std::move(AlignedBuffer::allocate(3 * AlignedBuffer::kPage)).value();
  std::memset(first.data(), 9, first.size());
  uint8_t* data = first.data();
  AlignedBuffer second = std::move(first);
  CHECK(second.data() == data && first.data() == nullptr);
  second.discard(1, 2 * AlignedBuffer::kPage);  // one whole page lies inside
  CHECK_EQ(int{data[AlignedBuffer::kPage - 1]}, 9);
  CHECK_EQ(int{data[AlignedBuffer::kPage]}, 0);
  CHECK_EQ(int{data[2 * AlignedBuffer::kPage]}, 9);
  second = AlignedBuffer();
  CHECK(second.data() == nullptr);
}

TEST(aligned_buffer_refuses_the_impossible) {
  Result<AlignedBuffer> made = AlignedBuffer::allocate(SIZE_MAX);
  CHECK(!made.is_ok());
  CHECK(made.status().code() == Code::resources);
  made = AlignedBuffer::allocate(size_t{1} << 60);
  CHECK(!made.is_ok());
}
