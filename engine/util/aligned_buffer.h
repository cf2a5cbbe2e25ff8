// Memory for weights, slots and staging: its own mapping, so that it is zeroed, counted exactly and given back to the
// system at once. From 2 MiB up it is aligned to 2 MiB and offered to the kernel as huge pages, which is worth a
// quarter of the bandwidth of a streaming read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "smoe/status.h"

namespace smoe {

class AlignedBuffer {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kHugePage = 2u << 20;

  // Zeroed. The pages are committed when they are first touched, never more than round_up(bytes, kPage) of them.
  // bytes == 0 gives an empty buffer with data() == nullptr. Errors: Code::resources.
  static Result<AlignedBuffer> allocate(size_t bytes);

  AlignedBuffer() = default;
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }

  // Gives the pages of [offset, offset + bytes) back; they read as zero afterwards. Whole pages inside the range only.
  void discard(size_t offset, size_t bytes);

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace smoe
