// The file that records are read from, opened past the page cache where that works.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>

#include "io/reader.h"
#include "io/transfer.h"

namespace smoe {

class RecordFile : public Source {
 public:
  // Direct reads are probed with one real aligned read; where they do not work, DirectMode::automatic reads through the
  // page cache and says so in `notice` (may be null). Errors: Code::io.
  static Result<std::unique_ptr<RecordFile>> open(const std::string& path, DirectMode mode, std::string* notice);
  ~RecordFile() override { close(fd_); }
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  ssize_t read(void* buffer, size_t length, uint64_t offset) override {
    return pread(fd_, buffer, length, static_cast<off_t>(offset));
  }
  // Whether this read may be asked for: direct reads are aligned to kIoAlignment. Errors: Code::failed.
  Status check(const ReadRequest& request) const;

  // Whether the file was written to since it was opened.
  bool changed() const;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  size_t alignment() const { return direct_ ? kIoAlignment : 1; }
  const std::string& path() const { return path_; }

 private:
  struct Version {
    int64_t seconds = 0, nanoseconds = 0, bytes = 0;
    bool operator==(const Version&) const = default;
  };
  RecordFile(std::string path, int fd, bool direct)
      : path_(std::move(path)), fd_(fd), direct_(direct), opened_(version()) {}
  Version version() const;
  static Result<std::unique_ptr<RecordFile>> open_one(const std::string& path, bool direct);

  const std::string path_;
  const int fd_;
  const bool direct_;
  const Version opened_;
};

}  // namespace smoe
