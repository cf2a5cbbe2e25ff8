#include "io/probe.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <vector>

#include "util/aligned_buffer.h"

namespace smoe {

namespace {

using Clock = std::chrono::steady_clock;

// Whole records of one file into as many slots as are in flight.
class Probe {
 public:
  Probe(uint64_t file_bytes, uint64_t record, const ProbeOptions& o)
      : record_(record),
        parts_(o.parts),
        place_(0, ((o.region_bytes != 0 ? std::clamp(o.region_bytes, record, file_bytes) : file_bytes) - record) /
                      (o.region_bytes != 0 ? record : kIoAlignment)),
        step_(o.region_bytes != 0 ? record : kIoAlignment),
        random_(static_cast<uint32_t>(Clock::now().time_since_epoch().count())),
        left_(o.depth) {}

  Status open(const std::string& path, const ProbeOptions& o) {
    // Whole huge pages, as nearly all of an engine's slots have: a tail of small ones made every read a third slower.
    const uint64_t whole =
        (o.depth * record_ + AlignedBuffer::kHugePage - 1) / AlignedBuffer::kHugePage * AlignedBuffer::kHugePage;
    SMOE_ASSIGN(memory_, AlignedBuffer::allocate(whole));
    const ReaderOptions options{o.kind, o.mode, o.depth, {memory_.data(), record_, o.depth}};
    SMOE_ASSIGN(reader_, open_reader(path, options, nullptr));
    return Status::ok();
  }

  void submit(uint64_t slot) { submit(slot, place_(random_) * step_); }

  // Every record of the region once.
  Status read_region(uint32_t depth) {
    uint32_t in_flight = 0;
    for (uint64_t n = 0; n <= place_.max(); ++n) {
      uint64_t slot = in_flight;
      if (in_flight == depth) {
        SMOE_ASSIGN(slot, wait());
      } else {
        ++in_flight;
      }
      submit(slot, n * step_);
    }
    for (; in_flight > 0; --in_flight) SMOE_TRY(wait().status());
    return Status::ok();
  }

  void submit(uint64_t slot, uint64_t offset) {
    const uint64_t part = (record_ / parts_ + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
    for (uint64_t at = 0; at < record_; at += part, ++left_[slot]) {
      reader_->submit({offset + at, std::min(part, record_ - at), memory_.data() + slot * record_ + at, slot});
    }
    reader_->flush();
  }

  // Waits for one whole record; its slot.
  Result<uint64_t> wait() {
    for (;;) {
      const ReadCompletion completion = reader_->wait();
      if (!completion.status.is_ok()) return completion.status;
      if (--left_[completion.tag] == 0) return completion.tag;
    }
  }

  const Reader& reader() const { return *reader_; }

 private:
  const uint64_t record_;
  const uint32_t parts_;
  std::uniform_int_distribution<uint64_t> place_;  // in steps
  const uint64_t step_;
  std::minstd_rand random_;
  std::vector<uint32_t> left_;  // [slot] parts on their way
  AlignedBuffer memory_;
  std::unique_ptr<Reader> reader_;
};

}  // namespace

Result<DiskSpeed> probe_disk(const std::string& path, uint64_t record_bytes, const ProbeOptions& o) {
  const uint64_t record = (record_bytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
  std::error_code error;
  const uint64_t file_bytes = std::filesystem::file_size(path, error);
  if (error) return Status(Code::io, "cannot open " + path + ": " + error.message());
  if (record == 0 || file_bytes < record) {
    return Status(Code::usage, path + " is smaller than one record of " + std::to_string(record_bytes) + " bytes");
  }
  if (o.depth == 0 || o.parts == 0) return Status(Code::usage, "depth and parts must be at least 1");
  Probe probe(file_bytes, record, o);
  SMOE_TRY(probe.open(path, o));
  if (o.region_bytes != 0) SMOE_TRY(probe.read_region(o.depth));

  const auto start = Clock::now();
  const auto stop = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(o.seconds));
  DiskSpeed speed;
  auto now = start;
  while (now < stop) {
    for (uint32_t slot = 0; slot < o.depth; ++slot) probe.submit(slot);
    for (uint32_t in_flight = o.depth; in_flight > 0;) {
      SMOE_ASSIGN(const uint64_t slot, probe.wait());
      ++speed.reads;
      now = Clock::now();
      if (!o.batches && now < stop) {
        probe.submit(slot);
      } else {
        --in_flight;
      }
    }
  }
  speed.direct = probe.reader().stats().direct;
  speed.backend = probe.reader().stats().backend;
  speed.read_bytes_s = static_cast<double>(speed.reads * record) / std::chrono::duration<double>(now - start).count();
  return speed;
}

}  // namespace smoe
