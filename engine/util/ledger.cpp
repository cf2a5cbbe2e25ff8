#include "util/ledger.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include "util/cgroup.h"

namespace smoe {
namespace {

Status refused(const std::string& what, const std::string& path) {
  return {Code::io, "cannot " + what + " " + path + ": " + std::strerror(errno),
          "it only tells engines of each other; remove it, or choose another folder"};
}

// When the process started, in clock ticks since boot: field 22 of /proc/PID/stat. Tells a process from a later one
// with the same pid. 0 = there is no such process, or no /proc.
uint64_t start_time(pid_t pid) {
  std::string text;
  if (!read_small_file("/proc/" + std::to_string(pid) + "/stat", &text)) return 0;
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));  // the name may hold spaces
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  uint64_t ticks = 0;
  return parse_bytes(field, &ticks) ? ticks : 0;
}

bool alive(pid_t pid, uint64_t since) {
  if (pid <= 0 || (kill(pid, 0) != 0 && errno != EPERM)) return false;
  return start_time(pid) == since;
}

}  // namespace

Result<Ledger> Ledger::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return refused("open", path);
  Ledger ledger(fd, path);
  while (flock(fd, LOCK_EX) != 0) {
    if (errno != EINTR) return refused("lock", path);
  }
  SMOE_TRY(ledger.read_entries());
  return ledger;
}

Ledger::Ledger(Ledger&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      kept_(std::move(other.kept_)),
      others_(other.others_) {}

Ledger& Ledger::operator=(Ledger&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(kept_, other.kept_);
  std::swap(others_, other.others_);
  return *this;
}

Ledger::~Ledger() {
  if (fd_ >= 0) close(fd_);  // and with it the lock
}

Status Ledger::read_entries() {
  std::string text;
  if (!read_small_file("/proc/self/fd/" + std::to_string(fd_), &text)) return refused("read", path_);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    int64_t pid = 0;
    uint64_t since = 0, bytes = 0;
    if (!(fields >> pid >> since >> bytes)) continue;  // a line cut short by a crash
    if (pid == getpid() || !alive(static_cast<pid_t>(pid), since)) continue;
    others_ += bytes;
    kept_ += line + "\n";
  }
  return Status::ok();
}

Status Ledger::reserve(uint64_t bytes) {
  std::string text = kept_;
  if (bytes > 0) {
    const std::string pid = std::to_string(getpid());
    text += pid + " " + std::to_string(start_time(getpid())) + " " + std::to_string(bytes) + "\n";
  }
  if (pwrite(fd_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) ||
      ftruncate(fd_, static_cast<off_t>(text.size())) != 0) {
    return refused("write", path_);
  }
  return Status::ok();
}

}  // namespace smoe
