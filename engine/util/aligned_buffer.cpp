#include "util/aligned_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace smoe {
namespace {

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

Status no_memory(size_t bytes) {
  return {Code::resources, "cannot map " + std::to_string(bytes) + " bytes of memory: " + std::strerror(errno),
          "lower --budget or --ctx, or free memory"};
}

}  // namespace

Result<AlignedBuffer> AlignedBuffer::allocate(size_t bytes) {
  AlignedBuffer buffer;
  if (bytes == 0) return buffer;
  if (bytes > SIZE_MAX / 2) {
    errno = ENOMEM;
    return no_memory(bytes);
  }
  const size_t length = round_up(bytes, kPage);
  const size_t alignment = length >= kHugePage ? kHugePage : kPage;
  // Map more than asked and cut both ends off, because mmap promises page alignment only.
  const size_t mapped = length + alignment - kPage;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return no_memory(bytes);
  const uintptr_t start = reinterpret_cast<uintptr_t>(base);
  const uintptr_t aligned = round_up(start, alignment);
  if (aligned > start) munmap(base, aligned - start);
  const size_t tail = start + mapped - (aligned + length);
  if (tail > 0) munmap(reinterpret_cast<void*>(aligned + length), tail);
  buffer.data_ = reinterpret_cast<uint8_t*>(aligned);
  buffer.bytes_ = bytes;
#ifdef MADV_HUGEPAGE
  if (length >= kHugePage) (void)madvise(buffer.data_, length, MADV_HUGEPAGE);  // advice: the kernel may not know it
#endif
  return buffer;
}

AlignedBuffer::~AlignedBuffer() {
  if (data_ != nullptr) munmap(data_, round_up(bytes_, kPage));
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void AlignedBuffer::discard(size_t offset, size_t bytes) {
  if (data_ == nullptr || offset >= bytes_) return;
  if (bytes > bytes_ - offset) bytes = bytes_ - offset;
  const size_t begin = round_up(offset, kPage);
  const size_t end = (offset + bytes) / kPage * kPage;
  if (begin < end) (void)madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace smoe
