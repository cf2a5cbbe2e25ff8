#include "vault/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace smoe {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostPerCall = size_t{1} << 30;  // Linux moves at most 2 GiB a call

Status fs_error(const std::error_code& error, const std::string& doing, const std::string& path) {
  return error ? os_error(error.value(), doing, path) : Status::ok();
}

}  // namespace

Status os_error(int error, const std::string& doing, const std::string& path) {
  const bool full = error == ENOSPC || error == EDQUOT;
  return Status(full ? Code::resources : Code::io, path + ": cannot " + doing + ": " + std::strerror(error),
                full ? "free some space and run the same command again" : "");
}

Status os_error(int error, const std::string& doing, const std::string& path, uint64_t offset) {
  return os_error(error, doing + " at byte " + std::to_string(offset), path);
}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
    path_ = std::move(other.path_);
  }
  return *this;
}

void File::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Result<File> File::open_read(const std::string& path) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return os_error(errno, "open", path);
  File file(fd, path);
  struct stat info;
  if (::fstat(fd, &info) != 0) return os_error(errno, "stat", path);
  if (!S_ISREG(info.st_mode)) return Status(Code::corrupt, path + ": is not a regular file");
  return file;
}

Result<File> File::open_write(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return os_error(errno, "create", path);
  return File(fd, path);
}

File File::open_direct(const std::string& path) {
#if defined(O_DIRECT)
  return File(::open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC), path);
#else
  (void)path;
  return File();
#endif
}

Result<uint64_t> File::size() const {
  struct stat info;
  if (::fstat(fd_, &info) != 0) return os_error(errno, "stat", path_);
  return static_cast<uint64_t>(info.st_size);
}

Status File::read_at(uint64_t offset, void* data, size_t bytes) const {
  auto* p = static_cast<uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, p, std::min(bytes, kMostPerCall), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, "read", path_, offset);
    if (n == 0)
      return Status(Code::corrupt, path_ + ": ends at byte " + std::to_string(offset) + ", before its data does");
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return Status::ok();
}

Status File::write_at(uint64_t offset, const void* data, size_t bytes) const {
  const auto* p = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, p, std::min(bytes, kMostPerCall), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(errno, "write", path_, offset);
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return Status::ok();
}

Status File::resize(uint64_t bytes) const {
  if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) return os_error(errno, "resize", path_, bytes);
  return Status::ok();
}

Status File::reserve(uint64_t bytes) const {
  SMOE_ASSIGN(const uint64_t now, size());
  if (now < bytes) SMOE_TRY(resize(bytes));
#if defined(__linux__)
  // Not posix_fallocate: where the file system cannot, glibc writes every block by hand.
  int result;
  do {
    result = bytes == 0 ? 0 : ::fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    return os_error(errno, "reserve " + std::to_string(bytes) + " bytes", path_);
  }
#endif
  return Status::ok();
}

Status File::sync() const {
  if (::fsync(fd_) != 0) return os_error(errno, "flush", path_);
  return Status::ok();
}

Status File::sync_data() const {
#if defined(__linux__)
  if (::fdatasync(fd_) != 0) return os_error(errno, "flush", path_);
  return Status::ok();
#else
  return sync();
#endif
}

void File::drop_cache() const {
#if defined(POSIX_FADV_DONTNEED)
  (void)::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
#endif
}

Status sync_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return os_error(errno, "open", path);
  // Some file systems cannot flush a folder and say EINVAL; there is nothing more to be done there.
  const int error = ::fsync(fd) != 0 && errno != EINVAL ? errno : 0;
  ::close(fd);
  return error == 0 ? Status::ok() : os_error(error, "flush", path);
}

Status rename_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) return os_error(errno, "rename to " + to, from);
  return Status::ok();
}

Status remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return os_error(errno, "remove", path);
  return Status::ok();
}

Status create_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  return fs_error(error, "create", path);
}

Status remove_folder(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  return fs_error(error, "remove", path);
}

Status sync_tree(const std::string& folder) {
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->is_directory()) {
      SMOE_TRY(sync_folder(it->path()));
    } else {
      SMOE_ASSIGN(const File file, File::open_read(it->path()));
      SMOE_TRY(file.sync());
    }
  }
  SMOE_TRY(fs_error(error, "list", folder));
  return sync_folder(folder);
}

bool file_exists(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0;
}

}  // namespace smoe
