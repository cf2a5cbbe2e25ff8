// The pread backend: a pool of threads, each reading one whole record at a time. Enough for a disk whose limit is
// reached at a depth of one or two records.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "io/backends.h"
#include "io/fifo.h"

namespace smoe {
namespace {

using Clock = std::chrono::steady_clock;

class PreadReader : public Reader {
 public:
  PreadReader(std::unique_ptr<RecordFile> file, uint32_t workers) : file_(std::move(file)) {
    stats_.backend = "pread";
    stats_.direct = file_->direct();
    for (uint32_t i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
  }
  ~PreadReader() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    requested_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(const ReadRequest& request) override {
    {
      std::lock_guard lock(mutex_);
      queue_.push({request, Clock::now()});
      ++in_flight_;
    }
    requested_.notify_one();
  }

  ReadCompletion wait() override {
    std::unique_lock lock(mutex_);
    if (in_flight_ == 0) return {0, Status(Code::failed, "wait() with no read in flight"), 0};
    completed_.wait(lock, [this] { return !finished_.empty(); });
    --in_flight_;
    return finished_.pop();
  }

  bool poll(ReadCompletion* out) override {
    std::lock_guard lock(mutex_);
    if (finished_.empty()) return false;
    --in_flight_;
    *out = finished_.pop();
    return true;
  }

  bool changed() const override { return file_->changed(); }

  ReadStats stats() const override {
    std::lock_guard lock(mutex_);
    return stats_;
  }

 private:
  struct Queued {
    ReadRequest request;
    Clock::time_point since;
  };

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      requested_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      const Queued next = queue_.pop();
      lock.unlock();
      uint32_t retries = 0;
      Status status = read(next.request, &retries);
      const auto latency = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - next.since);
      lock.lock();
      stats_.retries += retries;
      if (status.is_ok()) {
        ++stats_.reads;
        stats_.bytes += next.request.length;
      } else {
        ++stats_.errors;
      }
      finished_.push({next.request.tag, std::move(status), static_cast<uint32_t>(latency.count())});
      completed_.notify_one();
    }
  }

  Status read(const ReadRequest& request, uint32_t* retries) {
    SMOE_TRY(file_->check(request));
    return read_range(*file_, file_->path(), request, file_->alignment(), retries);
  }

  const std::unique_ptr<RecordFile> file_;
  mutable std::mutex mutex_;
  std::condition_variable requested_, completed_;
  Fifo<Queued> queue_;
  Fifo<ReadCompletion> finished_;
  size_t in_flight_ = 0;  // submitted and not yet handed back
  ReadStats stats_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<Reader>> open_pread_reader(std::unique_ptr<RecordFile> file, uint32_t workers) {
  if (workers == 0) return Status(Code::usage, "a reader needs at least one worker");
  return std::unique_ptr<Reader>(std::make_unique<PreadReader>(std::move(file), workers));
}

}  // namespace smoe
