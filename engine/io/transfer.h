// One record read to its end, whatever the operating system makes of it: the part that every backend shares, so that
// the fault tests of the in-memory double exercise the code that reads the disk.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "io/reader.h"
#include "smoe/status.h"

namespace smoe {

// The state of one request between the reads that make it up. A short read continues with what is left; one that fails
// is tried once more, then is an error (Code::io). The end of the file inside the range is an error (Code::corrupt: the
// file was cut short after it was opened, because open checks its size). With alignment > 1 every read starts at a
// multiple of it.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const ReadRequest& request, size_t alignment) : request_(request), alignment_(alignment) {}

  // What is to be read now.
  void* buffer() const { return static_cast<uint8_t*>(request_.buffer) + done_; }
  size_t length() const { return request_.length - done_; }
  uint64_t offset() const { return request_.offset + done_; }
  const ReadRequest& request() const { return request_; }

  // Takes in what the read gave: bytes, 0 at the end of the file, or a negative errno. True: there is more to read;
  // false: over, with status() and retries().
  bool take(int64_t got, const std::string& path);
  const Status& status() const { return status_; }
  uint32_t retries() const { return retries_; }

 private:
  bool fail(Status status);

  ReadRequest request_;
  size_t alignment_ = 1;
  size_t done_ = 0, furthest_ = 0;
  uint32_t retries_ = 0;
  Status status_;
};

// Something that behaves like pread: bytes read, 0 at the end of the file, -1 with errno set.
class Source {
 public:
  virtual ~Source() = default;
  virtual ssize_t read(void* buffer, size_t length, uint64_t offset) = 0;
};

// A whole Transfer by reads that block. `retries` counts.
Status read_range(Source& source, const std::string& path, const ReadRequest& request, size_t alignment,
                  uint32_t* retries);

}  // namespace smoe
