#include "io/probe.h"

#include <chrono>
#include <filesystem>
#include <random>

#include "util/aligned_buffer.h"

namespace smoe {

Result<DiskSpeed> probe_disk(const std::string& path, uint64_t record_bytes, double seconds, uint32_t depth,
                             DirectMode mode, ReaderKind kind) {
  using Clock = std::chrono::steady_clock;
  const uint64_t record = (record_bytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
  std::error_code error;
  const uint64_t file_bytes = std::filesystem::file_size(path, error);
  if (error) return Status(Code::io, "cannot open " + path + ": " + error.message());
  if (record == 0 || file_bytes < record) {
    return Status(Code::usage, path + " is smaller than one record of " + std::to_string(record_bytes) + " bytes");
  }
  SMOE_ASSIGN(AlignedBuffer memory, AlignedBuffer::allocate(depth * record));
  const ReaderOptions options{kind, mode, depth, {memory.data(), record, depth}};
  SMOE_ASSIGN(std::unique_ptr<Reader> reader, open_reader(path, options, nullptr));

  std::minstd_rand random(static_cast<uint32_t>(Clock::now().time_since_epoch().count()));
  std::uniform_int_distribution<uint64_t> place(0, (file_bytes - record) / kIoAlignment);
  const auto submit = [&](uint64_t slot) {
    reader->submit({place(random) * kIoAlignment, record, memory.data() + slot * record, slot});
  };
  const auto start = Clock::now();
  const auto stop = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (uint32_t slot = 0; slot < depth; ++slot) submit(slot);
  DiskSpeed speed;
  speed.direct = reader->stats().direct;
  speed.backend = reader->stats().backend;
  auto now = start;
  for (uint32_t in_flight = depth; in_flight > 0;) {
    const ReadCompletion completion = reader->wait();
    if (!completion.status.is_ok()) return completion.status;
    ++speed.reads;
    now = Clock::now();
    if (now < stop) {
      submit(completion.tag);
    } else {
      --in_flight;
    }
  }
  speed.read_bytes_s = static_cast<double>(speed.reads * record) / std::chrono::duration<double>(now - start).count();
  return speed;
}

}  // namespace smoe
