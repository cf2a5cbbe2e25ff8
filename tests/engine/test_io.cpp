#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <vector>

#include "check.h"
#include "fake_tree.h"
#include "io/fifo.h"
#include "io/memory.h"
#include "io/reader.h"
#include "util/aligned_buffer.h"
#include "util/cgroup.h"

using namespace smoe;

namespace {

constexpr size_t kRecord = 16384;

std::string pattern(size_t bytes) {
  std::string text(bytes, '\0');
  uint32_t state = 1;
  for (char& c : text) c = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);
  return text;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Reads records 0 .. count-1 all at once and compares them with `expected`.
void check_reads_all(Reader& reader, const std::string& expected, size_t count) {
  AlignedBuffer memory = std::move(AlignedBuffer::allocate(count * kRecord)).value();
  for (size_t i = 0; i < count; ++i) reader.submit({i * kRecord, kRecord, memory.data() + i * kRecord, 100 + i});
  std::set<uint64_t> tags;
  for (size_t i = 0; i < count; ++i) {
    const ReadCompletion completion = reader.wait();
    CHECK(completion.status.is_ok());
    tags.insert(completion.tag);
  }
  CHECK_EQ(tags.size(), count);
  CHECK(std::memcmp(memory.data(), expected.data(), count * kRecord) == 0);
  CHECK_EQ(reader.stats().reads, count);
  CHECK_EQ(reader.stats().bytes, count * kRecord);
}

// Both backends, or only one where the kernel refuses the other.
const std::vector<ReaderKind>& kinds() {
  static const std::vector<ReaderKind> found = [] {
    FakeTree tree;
    tree.write("file", pattern(kRecord));
    if (open_reader(tree.path("file"), {ReaderKind::uring, DirectMode::automatic, 1, {}}, nullptr).is_ok())
      return std::vector<ReaderKind>{ReaderKind::pread, ReaderKind::uring};
    std::cerr << "SKIP io_uring in every io_ test: the kernel has none or refuses it\n";
    return std::vector<ReaderKind>{ReaderKind::pread};
  }();
  return found;
}

Result<std::unique_ptr<Reader>> open_kind(const std::string& path, ReaderKind kind, DirectMode mode, uint32_t workers,
                                          std::string* notice = nullptr) {
  std::vector<std::string> notices;
  auto reader = open_reader(path, {kind, mode, workers, {}}, &notices);
  CHECK(notices.size() <= 1);
  if (notice != nullptr && !notices.empty()) *notice = notices[0];
  return reader;
}

ReadCompletion read_one(Reader& reader, uint64_t offset, void* buffer, size_t length = kRecord) {
  reader.submit({offset, length, buffer, 7});
  return reader.wait();
}

}  // namespace

TEST(io_fifo_keeps_order_while_it_grows) {
  Fifo<int> fifo;
  int pushed = 0, popped = 0;
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < round % 7; ++i) fifo.push(pushed++);
    for (int i = 0; i < round % 5 && !fifo.empty(); ++i) CHECK_EQ(fifo.pop(), popped++);
  }
  while (!fifo.empty()) CHECK_EQ(fifo.pop(), popped++);
  CHECK_EQ(popped, pushed);
}

TEST(io_reads_records_buffered_and_direct) {
  FakeTree tree;
  const std::string data = pattern(64 * kRecord);
  tree.write("vault", data);
  for (DirectMode mode : {DirectMode::buffered, DirectMode::automatic}) {
    for (ReaderKind kind : kinds()) {
      for (uint32_t workers : {1u, 8u}) {
        std::string notice;
        auto reader = open_kind(tree.path("vault"), kind, mode, workers, &notice);
        REQUIRE(reader.is_ok());
        // A fallback is told, and only a fallback.
        CHECK_EQ(notice.empty(), mode == DirectMode::buffered || (*reader)->stats().direct);
        if (mode == DirectMode::buffered) CHECK(!(*reader)->stats().direct);
        CHECK_EQ((*reader)->stats().backend, std::string(kind == ReaderKind::uring ? "uring" : "pread"));
        check_reads_all(**reader, data, 64);
      }
    }
  }
}

// tmpfs: old kernels refuse O_DIRECT at open, new ones take it. Either way the bytes are right and a fallback is told.
TEST(io_on_tmpfs) {
  std::error_code error;
  if (!std::filesystem::is_directory("/dev/shm", error)) {
    std::cerr << "SKIP io_on_tmpfs: there is no /dev/shm\n";
    return;
  }
  std::string path = "/dev/shm/smoe-test-XXXXXX";
  const int fd = mkstemp(path.data());
  REQUIRE(fd >= 0);
  const std::string data = pattern(4 * kRecord);
  CHECK_EQ(write(fd, data.data(), data.size()), static_cast<ssize_t>(data.size()));
  close(fd);
  for (ReaderKind kind : kinds()) {
    std::string notice;
    auto reader = open_kind(path, kind, DirectMode::automatic, 2, &notice);
    REQUIRE(reader.is_ok());
    CHECK_EQ(notice.empty(), (*reader)->stats().direct);
    check_reads_all(**reader, data, 4);
  }
  std::filesystem::remove(path);
}

// A file system that refuses O_DIRECT: /proc does, everywhere.
TEST(io_falls_back_where_direct_is_refused) {
  const std::string path = "/proc/version";
  std::string expected;
  if (!read_small_file(path, &expected) || expected.size() < 16) {
    std::cerr << "SKIP io_falls_back_where_direct_is_refused: there is no /proc/version\n";
    return;
  }
  std::string notice;
  auto reader = open_kind(path, ReaderKind::pread, DirectMode::automatic, 1, &notice);
  REQUIRE(reader.is_ok());
  CHECK(!(*reader)->stats().direct);
  CHECK(contains(notice, path) && contains(notice, std::strerror(EINVAL)));
  std::string got(16, ' ');
  CHECK(read_one(**reader, 0, got.data(), got.size()).status.is_ok());
  CHECK_EQ(got, expected.substr(0, 16));
  auto forced = open_kind(path, ReaderKind::pread, DirectMode::direct, 1);
  CHECK(forced.status().code() == Code::io);
  CHECK(contains(forced.status().message(), path));
}

TEST(io_truncated_while_open) {
  FakeTree tree;
  tree.write("vault", pattern(4 * kRecord));
  AlignedBuffer memory = std::move(AlignedBuffer::allocate(kRecord)).value();
  for (ReaderKind kind : kinds()) {
    for (DirectMode mode : {DirectMode::buffered, DirectMode::automatic}) {
      std::filesystem::resize_file(tree.path("vault"), 4 * kRecord);
      auto reader = open_kind(tree.path("vault"), kind, mode, 2);
      REQUIRE(reader.is_ok());
      for (size_t length : {2 * kRecord + 5000, 2 * kRecord + 1, 2 * kRecord, kRecord}) {
        std::filesystem::resize_file(tree.path("vault"), length);
        const ReadCompletion completion = read_one(**reader, 2 * kRecord, memory.data());
        CHECK(completion.status.code() == Code::corrupt);
        CHECK(contains(completion.status.message(), tree.path("vault")));
        CHECK(contains(completion.status.message(), "ends inside a record"));
        CHECK_EQ(completion.tag, 7u);
      }
      CHECK_EQ((*reader)->stats().errors, 4u);
      CHECK(read_one(**reader, 0, memory.data()).status.is_ok());  // the others still work
    }
  }
}

TEST(io_refuses_unaligned_direct_reads) {
  FakeTree tree;
  tree.write("vault", pattern(4 * kRecord));
  for (ReaderKind kind : kinds()) {
    auto reader = open_kind(tree.path("vault"), kind, DirectMode::automatic, 1);
    REQUIRE(reader.is_ok());
    AlignedBuffer memory = std::move(AlignedBuffer::allocate(2 * kRecord)).value();
    if (!(*reader)->stats().direct) {
      std::cerr << "SKIP io_refuses_unaligned_direct_reads: no direct reads on the temporary folder\n";
      return;
    }
    CHECK(!read_one(**reader, 1, memory.data()).status.is_ok());
    CHECK(!read_one(**reader, 0, memory.data() + 1).status.is_ok());
    CHECK(!read_one(**reader, 0, memory.data(), 100).status.is_ok());
  }
}

TEST(io_missing_file_and_misuse) {
  FakeTree tree;
  tree.write("vault", pattern(kRecord));
  CHECK(!open_kind(tree.path("vault"), ReaderKind::pread, DirectMode::automatic, 0).is_ok());
  for (ReaderKind kind : kinds()) {
    auto missing = open_kind("/nonexistent/vault", kind, DirectMode::automatic, 1);
    CHECK(!missing.is_ok());
    CHECK(contains(missing.status().message(), "/nonexistent/vault"));
    auto reader = open_kind(tree.path("vault"), kind, DirectMode::automatic, 1);
    REQUIRE(reader.is_ok());
    CHECK(!(*reader)->wait().status.is_ok());  // an error, not a hang
    ReadCompletion completion;
    CHECK(!(*reader)->poll(&completion));
  }
}

TEST(io_closes_with_reads_waiting) {
  FakeTree tree;
  tree.write("vault", pattern(200 * kRecord));
  AlignedBuffer memory = std::move(AlignedBuffer::allocate(200 * kRecord)).value();
  for (ReaderKind kind : kinds()) {
    auto reader = open_kind(tree.path("vault"), kind, DirectMode::automatic, 2);
    REQUIRE(reader.is_ok());
    for (size_t i = 0; i < 200; ++i) (*reader)->submit({i * kRecord, kRecord, memory.data() + i * kRecord, i});
  }
}

// More reads than a ring holds, taken as they come; the bytes are right whichever way they are taken.
TEST(io_polls_what_has_arrived) {
  FakeTree tree;
  const std::string data = pattern(150 * kRecord);
  tree.write("vault", data);
  for (ReaderKind kind : kinds()) {
    auto reader = open_kind(tree.path("vault"), kind, DirectMode::automatic, 3);
    REQUIRE(reader.is_ok());
    AlignedBuffer memory = std::move(AlignedBuffer::allocate(150 * kRecord)).value();
    for (size_t i = 0; i < 150; ++i) (*reader)->submit({i * kRecord, kRecord, memory.data() + i * kRecord, i});
    std::set<uint64_t> tags;
    ReadCompletion completion;
    while (tags.size() < 150) {
      if (!(*reader)->poll(&completion)) completion = (*reader)->wait();
      CHECK(completion.status.is_ok());
      REQUIRE(tags.insert(completion.tag).second);
      const size_t at = completion.tag * kRecord;
      CHECK(std::memcmp(memory.data() + at, data.data() + at, kRecord) == 0);
    }
    CHECK(!(*reader)->poll(&completion));
  }
}

// Slots are pinned as they are first used. Memory that is given back and taken again must be told: without forget() the
// kernel goes on reading into pages that are no longer there.
TEST(io_uring_registers_slots_and_forgets_them) {
  if (kinds().size() < 2) return;
  FakeTree tree;
  const std::string data = pattern(8 * kRecord);
  tree.write("vault", data);
  AlignedBuffer memory = std::move(AlignedBuffer::allocate(4 * kRecord)).value();
  ReaderOptions options;
  options.kind = ReaderKind::uring;
  options.slots = {memory.data(), kRecord, 4};
  auto reader = open_reader(tree.path("vault"), options, nullptr);
  REQUIRE(reader.is_ok());
  const auto holds = [&](size_t slot, size_t record) {
    const bool read = read_one(**reader, record * kRecord, memory.data() + slot * kRecord).status.is_ok();
    return read && std::memcmp(memory.data() + slot * kRecord, data.data() + record * kRecord, kRecord) == 0;
  };
  CHECK_EQ((*reader)->stats().registered_slots, 0u);
  for (size_t slot : {1, 1, 3}) CHECK(holds(slot, 7 - slot));
  if ((*reader)->stats().registered_slots == 0) {
    std::cerr << "SKIP io_uring_registers_slots_and_forgets_them: the kernel pins nothing for this user\n";
    return;
  }
  CHECK_EQ((*reader)->stats().registered_slots, 2u);
  (*reader)->forget(memory.data() + kRecord, kRecord);
  CHECK_EQ((*reader)->stats().registered_slots, 1u);
  memory.discard(kRecord, kRecord);
  for (size_t slot : {0, 1, 2, 3}) CHECK(holds(slot, slot));
  CHECK_EQ((*reader)->stats().registered_slots, 4u);
  // A buffer across two slots belongs to none.
  const bool across = read_one(**reader, 0, memory.data() + kRecord / 2).status.is_ok();
  CHECK(across && std::memcmp(memory.data() + kRecord / 2, data.data(), kRecord) == 0);
}

TEST(io_failed_read_is_retried_once) {
  const std::string text = pattern(4 * kRecord);
  const std::vector<uint8_t> bytes(text.begin(), text.end());
  std::vector<uint8_t> buffer(kRecord);
  MemoryReaderOptions options;
  options.fault = [](uint64_t call) { return Fault{call == 0 || call == 2 || call == 3 ? EIO : 0, 0, false}; };
  auto reader = open_memory_reader(bytes, options);
  CHECK(read_one(*reader, kRecord, buffer.data()).status.is_ok());
  CHECK(std::memcmp(buffer.data(), bytes.data() + kRecord, kRecord) == 0);
  CHECK_EQ(reader->stats().retries, 1u);
  const ReadCompletion failed = read_one(*reader, 2 * kRecord, buffer.data());
  CHECK(failed.status.code() == Code::io);
  CHECK(contains(failed.status.message(), std::strerror(EIO)));
  CHECK(contains(failed.status.message(), "offset " + std::to_string(2 * kRecord)));
  CHECK(read_one(*reader, 2 * kRecord, buffer.data()).status.is_ok());
  CHECK_EQ(reader->stats().errors, 1u);
}

TEST(io_interrupted_reads_do_not_count) {
  const std::vector<uint8_t> bytes(kRecord, 3);
  std::vector<uint8_t> buffer(kRecord);
  MemoryReaderOptions options;
  options.fault = [](uint64_t call) { return Fault{call < 10 ? EINTR : 0, 0, false}; };
  auto reader = open_memory_reader(bytes, options);
  CHECK(read_one(*reader, 0, buffer.data()).status.is_ok());
  CHECK_EQ(reader->stats().retries, 0u);
}

TEST(io_short_reads_continue) {
  const std::string text = pattern(4 * kRecord);
  const std::vector<uint8_t> bytes(text.begin(), text.end());
  for (size_t alignment : {size_t{1}, kIoAlignment}) {
    for (size_t limit : {kIoAlignment, kIoAlignment + 1, 3 * kIoAlignment - 1, kRecord - 1}) {
      std::vector<uint8_t> buffer(kRecord, 0);
      MemoryReaderOptions options;
      options.alignment = alignment;
      options.fault = [&](uint64_t) { return Fault{0, limit, false}; };
      auto reader = open_memory_reader(bytes, options);
      const bool ok = read_one(*reader, kRecord, buffer.data()).status.is_ok();
      CHECK(ok);
      CHECK(std::memcmp(buffer.data(), bytes.data() + kRecord, kRecord) == 0);
    }
  }
}

TEST(io_end_of_file_inside_a_record) {
  const std::vector<uint8_t> bytes(kRecord + 5000, 3);
  std::vector<uint8_t> buffer(kRecord);
  for (size_t alignment : {size_t{1}, kIoAlignment}) {
    MemoryReaderOptions options;
    options.alignment = alignment;
    auto reader = open_memory_reader(bytes, options);
    CHECK(read_one(*reader, kRecord, buffer.data()).status.code() == Code::corrupt);
    CHECK(read_one(*reader, 4 * kRecord, buffer.data()).status.code() == Code::corrupt);
    CHECK(read_one(*reader, 0, buffer.data()).status.is_ok());
  }
}
