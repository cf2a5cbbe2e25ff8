// Writing a vault: resumable after a kill at any moment, and atomic. Everything goes to part files; the final names are
// taken at the very end, the .smoe last, an older .smoe removed first, so that parts of two conversions never meet.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "smoe/status.h"
#include "vault/file.h"
#include "vault/journal.h"
#include "vault/scout.h"
#include "vault/vault.h"

namespace smoe {

// Every name that a conversion uses in its folder.
struct VaultNames {
  VaultNames(const std::string& folder, const std::string& stem);
  std::string folder, smoe, scout, tokenizer;         // <stem>.smoe, .scout.safetensors, .tokenizer/
  std::string smoe_part, scout_part, tokenizer_part;  // the same with .part behind
  std::string journal;                                // <stem>.convert.part
};

struct RecordGroup {   // the experts of one MoE layer
  uint32_t layer = 0;  // absolute
  uint32_t experts = 0;
  uint64_t record_bytes = 0;  // a multiple of kRecordAlignment
};

struct WriterOptions {
  std::string folder, stem;  // the folder is created if absent
  std::string fingerprint;   // of the source; a journal with another one is not resumed
  std::vector<RecordGroup> layers;
  std::vector<scout::Tensor> trunk;
  bool resume = true;
};

// Thread-safe: items may be written from several threads at once.
class VaultWriter {
 public:
  // Takes over what an earlier run with the same fingerprint and geometry left behind: each item that its journal names
  // is read back, and counts only if its checksum is right. Errors: Code::usage (another source or geometry, another
  // conversion running, no such layout), Code::resources (no room for it all), Code::io.
  static Result<std::unique_ptr<VaultWriter>> open(WriterOptions options);
  ~VaultWriter() = default;  // the parts stay, to be resumed

  std::vector<std::pair<uint32_t, uint32_t>> done_records() const;  // (MoE layer, expert)
  std::vector<std::string> done_tensors() const;

  // `data` is the record up to its end; the rest of record_bytes is filled with zeros. A whole record at an address
  // that is a multiple of kDirectAlignment is written past the page cache, where the file system can.
  Status write_record(uint32_t moe_layer, uint32_t expert, const void* data, uint64_t bytes);
  Status write_tensor(const std::string& name, const void* data, uint64_t bytes);

  Result<uint32_t> tensor_crc(const std::string& name) const;  // Code::usage if it is not written yet
  uint64_t scout_bytes() const { return scout_.file_bytes; }
  uint32_t scout_header_crc() const;

  // Everything written: appends table and manifest, checks the whole by opening it, flushes, takes the final names. A
  // folder <stem>.tokenizer.part becomes <stem>.tokenizer in the same step (write it after opening the writer, which
  // begins without one). A manifest that does not fit what was written is Code::corrupt and changes nothing.
  Status finish(const std::string& manifest_json);
  void close();

 private:
  struct Item {
    uint64_t offset = 0, bytes = 0;
    uint32_t crc = 0;
    bool done = false;
  };

  VaultWriter(WriterOptions options, scout::Layout layout, Journal journal);
  Status start();
  Status start_fresh();
  Status open_parts();
  Status take_back(const JournalContents& contents);
  Status verify_done(const JournalContents& contents);
  void forget(Item* item);
  Status note(bool is_record, uint64_t item, uint32_t crc, uint64_t bytes);
  Status sync_parts();
  Status check_complete() const;
  Status append_tail(const std::string& manifest_json, uint32_t* header_crc);
  Status check_parts() const;
  Status take_names(uint32_t header_crc);

  Status check_item(const File& file, Item* item, uint32_t crc) const;
  Status put_record(uint64_t offset, const void* data, uint64_t bytes, uint64_t length) const;

  const WriterOptions options_;
  const VaultNames names_;
  const scout::Layout scout_;
  Journal journal_;
  File smoe_part_, scout_part_;
  File smoe_direct_;                    // smoe_part_ once more; not open where the file system refuses
  std::vector<uint64_t> first_record_;  // of each MoE layer, in records_
  std::map<std::string, size_t> tensor_index_;

  std::shared_mutex life_;  // shared by whoever writes an item, alone to finish or close
  bool open_ = true;
  mutable std::mutex mutex_;  // guards what follows, and the journal
  std::vector<Item> records_, tensors_;
  uint64_t unsynced_bytes_ = 0;
  int64_t last_sync_ms_ = 0;
};

// Removes what a stopped conversion left behind. Code::usage while one is running.
Status discard_parts(const std::string& folder, const std::string& stem);

}  // namespace smoe
