// A fork-join pool: run(n, f) calls f(task, worker) for task in [0, n) on all workers, the caller included, and returns
// when all are done. Workers spin briefly, then park. No allocation per call. Not to be called from inside a task, nor
// from two threads at once; tasks must not throw. Tasks are claimed one by one in order, so make each worth some
// microseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace smoe {

// CPUs this process may use: the smaller of the affinity mask and the cgroup's CPU quota, at least 1. Of a quota that
// is not a whole number, `most` threads can use all, and are stopped for a part of every period; `whole` are never
// stopped.
struct UsableCpus {
  uint32_t most = 1, whole = 1;
};
// `root` is put before /proc and the cgroup mounts: tests pass a fake tree.
UsableCpus usable_cpus(const std::string& root = "");
inline uint32_t usable_threads(const std::string& root = "") { return usable_cpus(root).most; }

class ThreadPool {
 public:
  explicit ThreadPool(uint32_t threads);  // total, the caller included
  ~ThreadPool();
  uint32_t size() const;
  // How many workers take part in run() from now on, the caller included: 1 to size(). The others sleep. Not from
  // inside a task.
  void use(uint32_t threads);

  template <class F>
  void run(size_t tasks, F&& f) {
    run_erased(tasks, &f, [](void* ctx, size_t task, size_t worker) { (*static_cast<F*>(ctx))(task, worker); });
  }

 private:
  using Body = void (*)(void*, size_t, size_t);
  void run_erased(size_t tasks, void* ctx, Body body);  // tasks < 2^32
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smoe
