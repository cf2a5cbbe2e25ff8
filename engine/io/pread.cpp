// The pread backend: a pool of threads, each reading one whole record at a time. Enough for a disk whose limit is
// reached at a depth of one or two records.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "io/fifo.h"
#include "io/reader.h"
#include "io/transfer.h"
#include "util/aligned_buffer.h"

namespace smoe {
namespace {

using Clock = std::chrono::steady_clock;

class File : public Source {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() override { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  ssize_t read(void* buffer, size_t length, uint64_t offset) override {
    return pread(fd_, buffer, length, static_cast<off_t>(offset));
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

Result<std::unique_ptr<File>> open_file(const std::string& path, int flags) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
  if (fd < 0) return Status(Code::io, "cannot open " + path + ": " + std::strerror(errno));
  return std::make_unique<File>(fd);
}

// The alignment direct reads need, as far as the kernel says; 0 = it does not say, and "not at all" is UINT32_MAX.
uint32_t stated_alignment(int fd) {
#if defined(STATX_DIOALIGN)
  struct statx info{};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0 || !(info.stx_mask & STATX_DIOALIGN)) return 0;
  if (info.stx_dio_offset_align == 0) return UINT32_MAX;
  return std::max(info.stx_dio_offset_align, info.stx_dio_mem_align);
#else
  (void)fd;
  return 0;
#endif
}

// One real aligned read through `direct`, compared with what a buffered read gives: some file systems refuse O_DIRECT
// at open, some at the first read, and some accept it and read something else. "" = direct reads work.
std::string why_not_direct(const File& direct, const File& buffered) {
  const uint32_t alignment = stated_alignment(direct.fd());
  if (alignment == UINT32_MAX) return "the file system has none";
  if (alignment > kIoAlignment) return "it needs an alignment of " + std::to_string(alignment) + " bytes";
  Result<AlignedBuffer> memory = AlignedBuffer::allocate(2 * kIoAlignment);
  if (!memory.is_ok()) return memory.status().message();
  uint8_t* a = memory->data();
  uint8_t* b = a + kIoAlignment;
  const ssize_t got = pread(direct.fd(), a, kIoAlignment, 0);
  if (got < 0) return std::strerror(errno);
  if (got != pread(buffered.fd(), b, kIoAlignment, 0)) return "it returned another length than a buffered read";
  if (std::memcmp(a, b, static_cast<size_t>(got)) != 0) return "it returned other bytes than a buffered read";
  return "";
}

class PreadReader : public Reader {
 public:
  PreadReader(std::string path, std::unique_ptr<File> file, bool direct, uint32_t workers)
      : path_(std::move(path)), file_(std::move(file)), direct_(direct) {
    stats_.backend = "pread";
    stats_.direct = direct;
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
    const uint64_t bits = request.offset | request.length | reinterpret_cast<uintptr_t>(request.buffer);
    if (direct_ && bits % kIoAlignment != 0) {
      return {Code::failed, "a direct read of " + path_ + " at offset " + std::to_string(request.offset) +
                                " is not aligned to " + std::to_string(kIoAlignment) + " bytes"};
    }
    return read_range(*file_, path_, request, direct_ ? kIoAlignment : 1, retries);
  }

  const std::string path_;
  const std::unique_ptr<File> file_;
  const bool direct_;
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

Result<std::unique_ptr<Reader>> open_pread_reader(const std::string& path, DirectMode mode, uint32_t workers,
                                                  std::string* notice) {
  if (workers == 0) return Status(Code::usage, "a reader needs at least one worker");
  SMOE_ASSIGN(std::unique_ptr<File> buffered, open_file(path, 0));
  std::unique_ptr<File> direct;
  std::string reason;
  if (mode != DirectMode::buffered) {
    Result<std::unique_ptr<File>> opened = open_file(path, O_DIRECT);
    if (opened.is_ok()) direct = std::move(opened).value();
    reason = direct ? why_not_direct(*direct, *buffered) : opened.status().message();
    if (!reason.empty()) direct.reset();
  }
  if (!direct && mode == DirectMode::direct) {
    return Status(Code::io, "direct reads of " + path + " do not work: " + reason, "leave --direct out");
  }
  if (!direct && mode == DirectMode::automatic && notice != nullptr) {
    *notice = "direct reads of " + path + " do not work (" + reason + "); reading through the page cache instead";
  }
  const bool is_direct = direct != nullptr;
  auto reader =
      std::make_unique<PreadReader>(path, is_direct ? std::move(direct) : std::move(buffered), is_direct, workers);
  return std::unique_ptr<Reader>(std::move(reader));
}

}  // namespace smoe
