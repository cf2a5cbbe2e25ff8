#include "experts/history.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "util/crc32c.h"
#include "util/sha256.h"

namespace smoe {
namespace {

constexpr char kMagic[8] = {'S', 'M', 'O', 'E', 'U', 'S', 'E', 'D'};
constexpr size_t kDigits = 64, kFixed = sizeof kMagic + kDigits + 4;

void put_u32(std::string* out, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) *out += static_cast<char>(value >> shift & 0xff);
}

uint32_t get_u32(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= uint32_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
  return value;
}

Status trouble(const char* what, const std::string& path) {
  return {Code::io, std::string("cannot ") + what + " the usage file " + path + ": " + std::strerror(errno)};
}

// All of `bytes` to the disk; false with errno set.
bool write_all(int fd, const std::string& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t put = write(fd, bytes.data() + at, bytes.size() - at);
    if (put < 0 && errno != EINTR) return false;
    if (put > 0) at += static_cast<size_t>(put);
  }
  return fsync(fd) == 0;
}

}  // namespace

std::string history_fingerprint(const std::string& manifest_json) {
  Sha256 sha;
  sha.update(manifest_json.data(), manifest_json.size());
  return sha.hex();
}

Result<std::vector<float>> read_history(const std::string& path, const std::string& fingerprint, uint32_t records) {
  std::vector<float> counts;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? Result<std::vector<float>>(counts) : trouble("read", path);
  const size_t size = kFixed + size_t{4} * records + 4;
  std::string bytes(size + 1, '\0');  // one more, to see that there is no more
  size_t got = 0;
  for (ssize_t n = 1; n > 0 && got < bytes.size();) {
    n = read(fd, bytes.data() + got, bytes.size() - got);
    if (n > 0) got += static_cast<size_t>(n);
  }
  close(fd);
  bytes.resize(got);
  const auto damaged = [&] {
    return Status(Code::corrupt, "the usage file " + path + " is damaged",
                  "it is written anew; nothing is lost but a warm start");
  };
  if (got < kFixed || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) return damaged();
  if (bytes.compare(sizeof kMagic, kDigits, fingerprint) != 0) return counts;
  if (got != size || get_u32(bytes, kFixed - 4) != records ||
      get_u32(bytes, size - 4) != crc32c(bytes.data(), size - 4)) {
    return damaged();
  }
  counts.resize(records);
  std::memcpy(counts.data(), bytes.data() + kFixed, size_t{4} * records);
  for (float count : counts) {
    if (!std::isfinite(count) || count < 0) return damaged();
  }
  return counts;
}

Status write_history(const std::string& path, const std::string& fingerprint, const std::vector<float>& counts) {
  std::string bytes(kMagic, sizeof kMagic);
  bytes += fingerprint;
  put_u32(&bytes, static_cast<uint32_t>(counts.size()));
  bytes.append(reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof(float));
  put_u32(&bytes, crc32c(bytes.data(), bytes.size()));
  const std::string part = path + "." + std::to_string(getpid());
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return trouble("write", path);
  bool written = write_all(fd, bytes);
  written = close(fd) == 0 && written;
  if (!written || std::rename(part.c_str(), path.c_str()) != 0) {
    const Status status = trouble("write", path);
    unlink(part.c_str());
    return status;
  }
  return Status::ok();
}

}  // namespace smoe
