#include "vault/journal.h"

#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstdio>

#include "util/crc32c.h"
#include "util/json.h"

namespace smoe {
namespace {

constexpr char kFirstLine[] = "smoe-conversion 1";
constexpr size_t kHex = 8;

std::string hex8(uint32_t value) {
  char text[kHex + 1];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

bool from_hex8(std::string_view text, uint32_t* out) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), *out, 16);
  return text.size() == kHex && error == std::errc() && stop == text.data() + text.size();
}

// The fact of the line that begins at `at`, or nothing if it is cut or damaged; moves `at` behind it.
std::optional<std::string> next_fact(const std::string& text, size_t* at) {
  const size_t end = text.find('\n', *at);
  if (end == std::string::npos || end - *at < kHex + 1) return std::nullopt;
  const std::string fact = text.substr(*at, end - *at - kHex - 1);
  uint32_t crc = 0;
  if (!from_hex8(std::string_view(text).substr(end - kHex, kHex), &crc) || crc != crc32c(fact.data(), fact.size())) {
    return std::nullopt;
  }
  *at = end + 1;
  return fact;
}

std::optional<std::string> after(const std::optional<std::string>& fact, std::string_view word) {
  if (!fact || !fact->starts_with(word)) return std::nullopt;
  return fact->substr(word.size());
}

bool take_item(const std::string& fact, JournalContents* out) {
  uint64_t item = 0;
  uint32_t crc = 0;
  if (fact.size() < 2 + kHex || !from_hex8(std::string_view(fact).substr(fact.size() - kHex), &crc)) return false;
  if (fact.starts_with("F ")) {
    out->finishing = crc;
    return true;
  }
  const char* end = fact.data() + fact.size() - kHex - 1;
  const auto [stop, error] = std::from_chars(fact.data() + 2, end, item);
  if (error != std::errc() || stop != end) return false;
  if (fact.starts_with("R ")) {
    out->records[item] = crc;
  } else if (fact.starts_with("T ")) {
    out->tensors[item] = crc;
  } else {
    return false;
  }
  return true;
}

bool same_file(const File& file, const std::string& path) {
  struct stat mine, there;
  return ::fstat(file.fd(), &mine) == 0 && ::stat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
         mine.st_dev == there.st_dev;
}

}  // namespace

Result<Journal> Journal::open(const std::string& path) {
  SMOE_ASSIGN(File file, File::open_write(path));
  // A file system without locks is no reason not to convert. The holder may have finished and removed the name since:
  // then what is locked is no longer the journal.
  const bool held = ::flock(file.fd(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (held || !same_file(file, path)) {
    return Status(Code::usage, path + ": another conversion to this name is running",
                  "wait for it, or stop it and run the same command again");
  }
  return Journal(std::move(file));
}

Result<std::optional<JournalContents>> Journal::read() const {
  SMOE_ASSIGN(const uint64_t size, file_.size());
  std::string text(size, '\0');
  SMOE_TRY(file_.read_at(0, text.data(), size));
  JournalContents out;
  size_t at = 0;
  if (next_fact(text, &at) != kFirstLine) return std::optional<JournalContents>();
  const auto fingerprint = after(next_fact(text, &at), "fingerprint ");
  const auto geometry = after(next_fact(text, &at), "geometry ");
  if (!fingerprint || !geometry) return std::optional<JournalContents>();
  SMOE_ASSIGN(const Json quoted, Json::parse(*fingerprint));
  out.fingerprint = quoted.string();
  out.geometry = *geometry;
  out.bytes = at;
  for (auto fact = next_fact(text, &at); fact && take_item(*fact, &out); fact = next_fact(text, &at)) out.bytes = at;
  return std::optional<JournalContents>(std::move(out));
}

Status Journal::begin(const std::string& fingerprint, const std::string& geometry) {
  SMOE_TRY(file_.resize(0));
  end_ = 0;
  SMOE_TRY(append(kFirstLine));
  SMOE_TRY(append("fingerprint " + json_quote(fingerprint)));
  SMOE_TRY(append("geometry " + geometry));
  return sync();
}

Status Journal::finishing(uint32_t header_crc) {
  SMOE_TRY(append("F " + hex8(header_crc)));
  return sync();
}

Status Journal::remove() {
  SMOE_TRY(remove_file(file_.path()));
  file_.close();
  return Status::ok();
}

std::string Journal::item_text(uint64_t item, uint32_t crc) { return std::to_string(item) + " " + hex8(crc); }

Status Journal::append(const std::string& fact) {
  const std::string line = fact + " " + hex8(crc32c(fact.data(), fact.size())) + "\n";
  SMOE_TRY(file_.write_at(end_, line.data(), line.size()));
  end_ += line.size();  // after a failed write the next line takes its place
  return Status::ok();
}

}  // namespace smoe
