#include "io/memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/transfer.h"

namespace smoe {
namespace {

class MemoryReader : public Reader, private Source {
 public:
  MemoryReader(const std::vector<uint8_t>& bytes, MemoryReaderOptions options)
      : bytes_(bytes), options_(std::move(options)) {
    stats_.backend = "memory";
    stats_.direct = options_.alignment > 1;
  }

  void submit(const ReadRequest& request) override { waiting_.push_back(request); }

  ReadCompletion wait() override {
    if (waiting_.empty()) return {0, Status(Code::failed, "wait() with no read in flight"), 0};
    const size_t index = options_.choose ? options_.choose(waiting_.size()) : 0;
    const ReadRequest request = waiting_[index];
    waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(index));
    uint32_t retries = 0;
    ReadCompletion completion{request.tag, read_range(*this, "memory", request, options_.alignment, &retries), 0};
    stats_.retries += retries;
    if (completion.status.is_ok()) {
      ++stats_.reads;
      stats_.bytes += request.length;
    } else {
      ++stats_.errors;
    }
    return completion;
  }

  bool poll(ReadCompletion* out) override {
    if (waiting_.empty() || (options_.late && options_.late(polls_++))) return false;
    *out = wait();
    return true;
  }

  bool changed() const override { return options_.changed && options_.changed(); }
  ReadStats stats() const override { return stats_; }

 private:
  ssize_t read(void* buffer, size_t length, uint64_t offset) override {
    const Fault fault = options_.fault ? options_.fault(calls_++) : Fault{};
    if (fault.error != 0) {
      errno = fault.error;
      return -1;
    }
    if (fault.end || offset >= bytes_.size()) return 0;
    if (fault.limit != 0) length = std::min(length, fault.limit);
    length = std::min<size_t>(length, bytes_.size() - offset);
    std::memcpy(buffer, bytes_.data() + offset, length);
    return static_cast<ssize_t>(length);
  }

  const std::vector<uint8_t>& bytes_;
  const MemoryReaderOptions options_;
  std::vector<ReadRequest> waiting_;
  uint64_t calls_ = 0, polls_ = 0;
  ReadStats stats_;
};

}  // namespace

std::unique_ptr<Reader> open_memory_reader(const std::vector<uint8_t>& bytes, MemoryReaderOptions options) {
  return std::make_unique<MemoryReader>(bytes, std::move(options));
}

}  // namespace smoe
