// What the fuzz drivers share: a generator of random numbers, the command line, and a parent that watches the child in
// which the cases run, so that a crash, a hang or a swollen process is reported with the seed that repeats it.
//
//   DRIVER [--seed N] [--runs N] [--seconds N] [--folder DIR]
//
// Deterministic: case i depends on seed + i only. Exit codes: 0 nothing found, 1 something found, 2 usage.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "../tests/engine/fake_tree.h"

namespace fuzz {

inline constexpr long kMostRssKib = 2 << 20;  // the sanitizer's own quarantine included
inline constexpr int kMostSecondsPerCase = 60;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t next() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return n == 0 ? 0 : next() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[below(from.size())];
  }

 private:
  uint64_t state_;
};

// Shared with the parent, which reports the case that a child died in.
struct Progress {
  std::atomic<uint64_t> seed, cases;
  std::atomic<uint64_t> accepted;  // inputs that were taken for good
};

struct Options {
  uint64_t seed = 1, runs = UINT64_MAX;
  double seconds = 10;
  std::string folder;
};

inline bool parse(int argc, char** argv, Options* o) {
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (i + 1 == argc) return false;
    const char* value = argv[i + 1];
    if (flag == "--seed") {
      o->seed = std::strtoull(value, nullptr, 10);
    } else if (flag == "--runs") {
      o->runs = std::strtoull(value, nullptr, 10);
      o->seconds = 1e9;
    } else if (flag == "--seconds") {
      o->seconds = std::strtod(value, nullptr);
    } else if (flag == "--folder") {
      o->folder = value;
    } else {
      return false;
    }
  }
  return true;
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Waits for the child; kills it when one case takes too long. True if it ended well.
inline bool watch(pid_t pid, const Progress& progress) {
  int status = 0;
  uint64_t last = UINT64_MAX;
  double since = now();
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (progress.cases != last) last = progress.cases, since = now();
    if (now() - since > kMostSecondsPerCase) {
      std::fprintf(stderr, "a case took more than %d s\n", kMostSecondsPerCase);
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      return false;
    }
    ::usleep(20000);
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

inline void check_memory() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0 || usage.ru_maxrss <= kMostRssKib) return;
  std::fprintf(stderr, "a small input took %ld KiB\n", usage.ru_maxrss);
  std::abort();
}

// `make(folder, progress)` runs once in the child and returns what runs one case: void(uint64_t seed).
template <class Make>
int run(int argc, char** argv, const char* name, Make&& make) {
  Options o;
  if (!parse(argc, argv, &o)) {
    std::fprintf(stderr, "usage: %s [--seed N] [--runs N] [--seconds N] [--folder DIR]\n", name);
    return 2;
  }
  void* shared = ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  auto* progress = new (shared) Progress{};
  const FakeTree scratch;
  const double start = now();
  const pid_t pid = ::fork();
  if (pid == 0) {
    auto one = make(o.folder.empty() ? scratch.path("fuzz") : o.folder, progress);
    for (uint64_t i = 0; i < o.runs && now() < start + o.seconds; ++i) {
      progress->seed = o.seed + i;
      one(o.seed + i);
      check_memory();
      ++progress->cases;
    }
    ::_exit(0);
  }
  const bool good = pid > 0 && watch(pid, *progress);
  const uint64_t cases = progress->cases;
  std::printf("%llu cases, %.0f a second, %llu inputs accepted\n", static_cast<unsigned long long>(cases),
              static_cast<double>(cases) / (now() - start), static_cast<unsigned long long>(progress->accepted));
  if (good) return 0;
  std::printf("FOUND: repeat with --seed %llu --runs 1\n", static_cast<unsigned long long>(progress->seed));
  return 1;
}

}  // namespace fuzz
