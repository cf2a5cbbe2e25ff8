// How many threads a pass of few rows gets where a CPU quota is not a whole number of CPUs: as many as can use all of
// it, which are then stopped for a part of every period, or as many as are never stopped. The former are right where
// arithmetic binds, the latter where one thread takes most of what memory gives, so both are tried and the faster one
// stays, until the other is tried again. Never changes a result.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace smoe {

class ThreadChoice {
 public:
  // `most` threads there are; `whole` of them, at least 1, are never stopped. No choice where these are equal.
  ThreadChoice(uint32_t most, uint32_t whole) : threads_{most, whole} {}

  // For a pass of so many rows.
  uint32_t threads(size_t rows) const { return is_open(rows) ? threads_[of_rows_[rows - 1].arm] : threads_[0]; }
  // A pass with what threads() said took so long.
  void took(size_t rows, double seconds);

 private:
  static constexpr size_t kMostRows = 8;         // more are bound by arithmetic, as prompts are
  static constexpr double kTrySeconds = 0.5;     // some periods of a quota, which are 0.1 s
  static constexpr uint32_t kTriesBetween = 32;  // before the slower one is tried again

  // Passes of as many rows last alike.
  struct Rows {
    size_t arm = 0;  // of threads_
    double seconds = 0;
    uint32_t passes = 0, tries = 0;  // of this try; since the other arm was tried
    std::array<double, 2> mean_s{};  // of a pass, 0: not tried yet
  };
  bool is_open(size_t rows) const { return threads_[0] != threads_[1] && rows >= 1 && rows <= kMostRows; }

  const std::array<uint32_t, 2> threads_;
  std::array<Rows, kMostRows> of_rows_{};
};

}  // namespace smoe
