// A file descriptor with whole reads and writes, and errors that name file, place and cause.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "smoe/status.h"

namespace smoe {

// What the operating system answered: Code::resources for a full disk or quota, Code::io otherwise.
Status os_error(int error, const std::string& doing, const std::string& path);
Status os_error(int error, const std::string& doing, const std::string& path, uint64_t offset);

inline constexpr uint64_t kDirectAlignment = 4096;

class File {
 public:
  File() = default;
  // For reading; regular files only. An absent file is Code::io.
  static Result<File> open_read(const std::string& path);
  // For reading and writing; created if absent, never truncated.
  static Result<File> open_write(const std::string& path);
  // For writes past the page cache, whose address, offset and length are multiples of kDirectAlignment. Not open where
  // the file system refuses such writes; one that refuses them only later gives Code::io.
  static File open_direct(const std::string& path);
  ~File() { close(); }
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}
  File& operator=(File&& other) noexcept;

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void close();

  Result<uint64_t> size() const;
  // All `bytes`, or an error; the file ending early is Code::corrupt.
  Status read_at(uint64_t offset, void* data, size_t bytes) const;
  Status write_at(uint64_t offset, const void* data, size_t bytes) const;
  Status resize(uint64_t bytes) const;
  // Grows to `bytes` and reserves the room, where the file system can; a full disk is found here rather than hours
  // later.
  Status reserve(uint64_t bytes) const;
  Status sync() const;       // data and metadata are on the disk
  Status sync_data() const;  // data is
  // What is read next comes from the disk: after a failed flush the page cache may hold what the disk does not.
  void drop_cache() const;

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_;
};

// A folder's entries (renames, removals) are on the disk.
Status sync_folder(const std::string& path);
Status rename_file(const std::string& from, const std::string& to);
Status remove_file(const std::string& path);    // an absent file is fine
Status create_folder(const std::string& path);  // and those above it
Status remove_folder(const std::string& path);  // and all in it; an absent one is fine
Status sync_tree(const std::string& folder);    // everything in it is on the disk
bool file_exists(const std::string& path);

}  // namespace smoe
