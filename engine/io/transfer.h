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

// Something that behaves like pread: bytes read, 0 at the end of the file, -1 with errno set.
class Source {
 public:
  virtual ~Source() = default;
  virtual ssize_t read(void* buffer, size_t length, uint64_t offset) = 0;
};

// Reads [offset, offset + length). A short read continues with what is left; one that fails is tried once more, then is
// an error (Code::io). The end of the file inside the range is an error (Code::corrupt: the file was cut short after it
// was opened, because open checks its size). With alignment > 1 every read starts at a multiple of it. `retries`
// counts.
Status read_range(Source& source, const std::string& path, const ReadRequest& request, size_t alignment,
                  uint32_t* retries);

}  // namespace smoe
