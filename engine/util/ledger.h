// Which memory running engines have promised themselves, so that a second engine on the machine plans with what is
// left. One small file of "pid start-time bytes" lines, locked while it is read and written. An entry whose process is
// gone, or whose pid belongs to another process now, is void and is dropped by the next writer.
#pragma once

#include <cstdint>
#include <string>

#include "smoe/status.h"

namespace smoe {

// Holds the lock from open() to its end: read what others have, plan, reserve, close. Keep it that short.
class Ledger {
 public:
  // Makes the file (readable by this user only) but not its folder. Errors: Code::io naming the path.
  static Result<Ledger> open(const std::string& path);
  Ledger(Ledger&& other) noexcept;
  Ledger& operator=(Ledger&& other) noexcept;
  ~Ledger();

  uint64_t reserved_by_others() const { return others_; }
  // This process's entry from now on; 0 takes it out. It is void when the process ends, however that happens.
  Status reserve(uint64_t bytes);

 private:
  explicit Ledger(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  Status read_entries();

  int fd_ = -1;
  std::string path_;
  std::string kept_;  // the living entries of other processes, as lines
  uint64_t others_ = 0;
};

}  // namespace smoe
