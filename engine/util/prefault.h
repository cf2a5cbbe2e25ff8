// Commits memory beside what the process does: a page's first use costs its zeroing, and in a virtual machine many
// times that, which a read into it would have to wait for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace smoe {

class Prefault {
 public:
  // The first bytes are enough: what comes later is touched when there is other work to overlap it with.
  static constexpr size_t kMost = size_t{1} << 30;

  ~Prefault() { stop(); }
  // [memory, memory + bytes), page-aligned, in this order and at most kMost of it. Does nothing where the system cannot
  // commit pages without writing to them. Once.
  void start(uint8_t* memory, size_t bytes);
  // Returns when no page will be committed any more: before memory is given back.
  void stop();
  // So many bytes from the beginning have memory by it.
  size_t committed() const { return committed_; }

 private:
  std::atomic<bool> stop_ = false;
  std::atomic<size_t> committed_ = 0;
  std::thread thread_;
};

}  // namespace smoe
