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

bool Transfer::fail(Status status) {
  status_ = std::move(status);
  return false;
}

bool Transfer::take(int64_t got, const std::string& path) {
  if (got < 0) {
    if (got == -EINTR) return true;
    if (retries_ > 0) {
      return fail({Code::io, "read failed: " + at(path, request_, done_) + ": " + std::strerror(static_cast<int>(-got)),
                   "check the disk and its cable or network; `smoe verify` reads every byte of the model"});
    }
    ++retries_;
    return true;
  }
  done_ += static_cast<size_t>(got);
  if (done_ >= request_.length) return false;
  // A direct read must start at a multiple of the alignment, so what lies behind the last multiple is read again; no
  // progress beyond what was there before means that the file ends here.
  if (done_ <= furthest_ || got == 0) {
    return fail({Code::corrupt, "the file ends inside a record: " + at(path, request_, done_),
                 "it was cut short while in use; convert or copy the model again"});
  }
  furthest_ = done_;
  done_ -= done_ % alignment_;
  return true;
}

Status read_range(Source& source, const std::string& path, const ReadRequest& request, size_t alignment,
                  uint32_t* retries) {
  Transfer transfer(request, alignment);
  int64_t got;
  do {
    got = transfer.length() == 0 ? 0 : source.read(transfer.buffer(), transfer.length(), transfer.offset());
  } while (transfer.take(got < 0 ? -errno : got, path));
  *retries += transfer.retries();
  return transfer.status();
}

}  // namespace smoe
