// Wire over two descriptors.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "serve.h"

namespace smoe {
namespace {

class FdWire final : public Wire {
 public:
  FdWire(int in_fd, int out_fd, int wake_read, int wake_write)
      : in_(in_fd), out_(out_fd), wake_read_(wake_read), wake_write_(wake_write) {}
  ~FdWire() override {
    ::close(wake_read_);
    ::close(wake_write_);
  }

  // A poll first: a thread blocked in read() could not be told that the output is gone.
  size_t read(char* data, size_t size) override {
    for (;;) {
      pollfd fds[] = {{in_, POLLIN, 0}, {wake_read_, POLLIN, 0}};
      if (::poll(fds, 2, -1) < 0 && errno != EINTR) return 0;
      if (fds[1].revents) return 0;
      if (!fds[0].revents) continue;
      const ssize_t n = ::read(in_, data, size);
      if (n >= 0) return static_cast<size_t>(n);
      if (errno != EINTR && errno != EAGAIN) return 0;
    }
  }

  bool write(std::string_view words) override {
    while (!words.empty()) {
      const ssize_t n = ::write(out_, words.data(), words.size());
      if (n > 0) {
        words.remove_prefix(static_cast<size_t>(n));
      } else if (n < 0 && errno == EAGAIN) {
        pollfd fd = {out_, POLLOUT, 0};
        if (::poll(&fd, 1, -1) < 0 && errno != EINTR) return false;
      } else if (n == 0 || errno != EINTR) {
        return false;
      }
    }
    return true;
  }

  void stop() override {
    const char byte = 0;
    while (::write(wake_write_, &byte, 1) < 0 && errno == EINTR) {
    }
  }

 private:
  const int in_, out_, wake_read_, wake_write_;
};

}  // namespace

Result<std::unique_ptr<Wire>> open_wire(int in_fd, int out_fd) {
  int wake[2];
  if (::pipe(wake) != 0) return Status{Code::io, std::string("no pipe for the protocol loop: ") + std::strerror(errno)};
  for (int fd : wake) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return std::unique_ptr<Wire>(std::make_unique<FdWire>(in_fd, out_fd, wake[0], wake[1]));
}

}  // namespace smoe
