// A wire in memory: the test is the client.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "serve.h"

namespace smoe {

class MemoryWire final : public Wire {
 public:
  // --- the engine's side
  size_t read(char* data, size_t size) override {
    std::unique_lock lock(mutex_);
    waiting_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return at_ < in_.size() || ended_ || stopped_; });
    waiting_ = false;
    if (stopped_) return 0;
    const size_t n = std::min({size, in_.size() - at_, piece_});
    std::memcpy(data, in_.data() + at_, n);
    at_ += n;
    return n;
  }
  bool write(std::string_view words) override {
    std::lock_guard lock(mutex_);
    if (broken_) return false;
    out_ += words;
    changed_.notify_all();
    return true;
  }
  void stop() override {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

  // --- the client's side
  void send(std::string_view text) {
    std::lock_guard lock(mutex_);
    in_ += text;
    changed_.notify_all();
  }
  void end() {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  void break_output() {
    std::lock_guard lock(mutex_);
    broken_ = true;
  }
  void set_piece(size_t bytes) { piece_ = bytes; }  // read() gives no more than this at once
  // Until the output contains `text`; false after ten seconds.
  bool wait_for(std::string_view text) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return out_.find(text) != out_.npos; });
  }
  // Until the engine has dealt with all that was sent, and has come back for more.
  bool wait_read() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return waiting_ && at_ == in_.size(); });
  }
  bool all_taken() {
    std::lock_guard lock(mutex_);
    return at_ == in_.size();
  }
  std::string output() {
    std::lock_guard lock(mutex_);
    return out_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string in_, out_;
  size_t at_ = 0, piece_ = ~size_t{0};
  bool ended_ = false, stopped_ = false, broken_ = false, waiting_ = false;
};

}  // namespace smoe
