#include "io/record_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "util/aligned_buffer.h"

namespace smoe {
namespace {

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
std::string why_not_direct(RecordFile& direct, RecordFile& buffered) {
  const uint32_t alignment = stated_alignment(direct.fd());
  if (alignment == UINT32_MAX) return "the file system has none";
  if (alignment > kIoAlignment) return "it needs an alignment of " + std::to_string(alignment) + " bytes";
  Result<AlignedBuffer> memory = AlignedBuffer::allocate(2 * kIoAlignment);
  if (!memory.is_ok()) return memory.status().message();
  uint8_t* a = memory->data();
  uint8_t* b = a + kIoAlignment;
  const ssize_t got = direct.read(a, kIoAlignment, 0);
  if (got < 0) return std::strerror(errno);
  if (got != buffered.read(b, kIoAlignment, 0)) return "it returned another length than a buffered read";
  if (std::memcmp(a, b, static_cast<size_t>(got)) != 0) return "it returned other bytes than a buffered read";
  return "";
}

}  // namespace

Result<std::unique_ptr<RecordFile>> RecordFile::open_one(const std::string& path, bool direct) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
  if (fd < 0) return Status(Code::io, "cannot open " + path + ": " + std::strerror(errno));
  return std::unique_ptr<RecordFile>(new RecordFile(path, fd, direct));
}

Result<std::unique_ptr<RecordFile>> RecordFile::open(const std::string& path, DirectMode mode, std::string* notice) {
  SMOE_ASSIGN(std::unique_ptr<RecordFile> buffered, open_one(path, false));
  if (mode == DirectMode::buffered) return buffered;
  Result<std::unique_ptr<RecordFile>> direct = open_one(path, true);
  const std::string reason = direct.is_ok() ? why_not_direct(**direct, *buffered) : direct.status().message();
  if (reason.empty()) return direct;
  if (mode == DirectMode::direct) {
    return Status(Code::io, "direct reads of " + path + " do not work: " + reason, "leave --direct out");
  }
  if (notice != nullptr) {
    *notice = "direct reads of " + path + " do not work (" + reason + "); reading through the page cache instead";
  }
  return buffered;
}

RecordFile::Version RecordFile::version() const {
  struct stat info{};
  if (fstat(fd_, &info) != 0) return {};
  return {static_cast<int64_t>(info.st_mtim.tv_sec), static_cast<int64_t>(info.st_mtim.tv_nsec),
          static_cast<int64_t>(info.st_size)};
}

bool RecordFile::changed() const { return version() != opened_; }

Status RecordFile::check(const ReadRequest& request) const {
  const uint64_t bits = request.offset | request.length | reinterpret_cast<uintptr_t>(request.buffer);
  if (!direct_ || bits % kIoAlignment == 0) return Status::ok();
  return {Code::failed, "a direct read of " + path_ + " at offset " + std::to_string(request.offset) +
                            " is not aligned to " + std::to_string(kIoAlignment) + " bytes"};
}

}  // namespace smoe
