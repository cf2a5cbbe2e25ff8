#include "io/transfer.h"

#include <cerrno>
#include <cstring>

namespace smoe {
namespace {

std::string at(const std::string& path, const ReadRequest& request, size_t done) {
  return path + " at offset " + std::to_string(request.offset + done) + " (" + std::to_string(done) + " of " +
         std::to_string(request.length) + " bytes of the record read)";
}

}  // namespace

Status read_range(Source& source, const std::string& path, const ReadRequest& request, size_t alignment,
                  uint32_t* retries) {
  uint8_t* buffer = static_cast<uint8_t*>(request.buffer);
  size_t done = 0, furthest = 0;
  bool retried = false;
  while (done < request.length) {
    const ssize_t got = source.read(buffer + done, request.length - done, request.offset + done);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (retried) {
        return {Code::io, "read failed: " + at(path, request, done) + ": " + std::strerror(errno),
                "check the disk and its cable or network; `smoe verify` reads every byte of the model"};
      }
      retried = true;
      ++*retries;
      continue;
    }
    done += static_cast<size_t>(got);
    if (done >= request.length) break;
    // A direct read must start at a multiple of the alignment, so what lies behind the last multiple is read again; no
    // progress beyond what was there before means that the file ends here.
    if (done <= furthest || got == 0) {
      return {Code::corrupt, "the file ends inside a record: " + at(path, request, done),
              "it was cut short while in use; convert or copy the model again"};
    }
    furthest = done;
    done -= done % alignment;
  }
  return Status::ok();
}

}  // namespace smoe
