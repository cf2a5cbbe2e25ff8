// The journal of a conversion under way: what it converts, and which items are written with which checksum. One text
// line per fact, each ending in its own CRC-32C, so that a line cut by a kill is told from a whole one. Holding it open
// holds the lock against a second conversion of the same name.
//
//   smoe-conversion 1 <crc>
//   fingerprint "<source fingerprint>" <crc>
//   geometry <JSON> <crc>
//   R <record> <crc of its bytes> <crc>         records counted over all MoE layers
//   T <tensor> <crc of its bytes> <crc>         tensors in the order given
//   F <crc of the header> <crc>                 everything is written; the final names are being taken
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "vault/file.h"

namespace smoe {

struct JournalContents {
  std::string fingerprint, geometry;
  std::map<uint64_t, uint32_t> records, tensors;  // item -> checksum; the last line about an item counts
  std::optional<uint32_t> finishing;              // the header's checksum
  uint64_t bytes = 0;                             // up to the last whole line
};

class Journal {
 public:
  // Creates the file if absent and locks it. Code::usage if another process holds it.
  static Result<Journal> open(const std::string& path);

  // Nothing if the journal is new or cut within its first lines: then nothing was written yet that counts.
  Result<std::optional<JournalContents>> read() const;
  Status begin(const std::string& fingerprint, const std::string& geometry);
  void resume(const JournalContents& contents) { end_ = contents.bytes; }
  Status record(uint64_t item, uint32_t crc) { return append("R " + item_text(item, crc)); }
  Status tensor(uint64_t item, uint32_t crc) { return append("T " + item_text(item, crc)); }
  Status finishing(uint32_t header_crc);
  Status sync() const { return file_.sync_data(); }
  Status remove();  // and unlock
  void close() { file_.close(); }

 private:
  explicit Journal(File file) : file_(std::move(file)) {}
  static std::string item_text(uint64_t item, uint32_t crc);
  Status append(const std::string& fact);

  File file_;
  uint64_t end_ = 0;
};

}  // namespace smoe
