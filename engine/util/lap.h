// A clock that is never stopped: each lap is added to the account that the caller names at its end, so that accounts
// add up to the time that passed.
#pragma once

#include <chrono>

namespace smoe {

class Lap {
 public:
  void restart() { at_ = Clock::now(); }
  // Adds the milliseconds since the last call to `account`.
  void into(double* account) {
    const Clock::time_point now = Clock::now();
    *account += std::chrono::duration<double, std::milli>(now - at_).count();
    at_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point at_ = Clock::now();
};

}  // namespace smoe
