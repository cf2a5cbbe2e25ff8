#include "vault/writer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <shared_mutex>
#include <sstream>

#include "util/json.h"
#include "vault/format.h"

namespace smoe {
namespace {

constexpr uint64_t kSyncBytes = uint64_t{64} << 20;
constexpr int64_t kSyncMs = 1000;
constexpr std::array<uint8_t, kRecordAlignment> kZeros{};

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The options that decide where every byte goes, as one line of JSON: equal text, equal geometry.
std::string geometry_json(const WriterOptions& o) {
  std::ostringstream json;
  json << "{\"layers\":[";
  for (size_t i = 0; i < o.layers.size(); ++i) {
    const RecordGroup& g = o.layers[i];
    json << (i ? ",[" : "[") << g.layer << "," << g.experts << "," << g.record_bytes << "]";
  }
  json << "],\"trunk\":[";
  for (size_t i = 0; i < o.trunk.size(); ++i) {
    const scout::Tensor& t = o.trunk[i];
    json << (i ? ",[" : "[") << json_quote(t.name) << "," << json_quote(t.dtype);
    for (const uint64_t size : t.shape) json << "," << size;
    json << "]";
  }
  json << "]}";
  return json.str();
}

Status check_options(const WriterOptions& o) {
  if (o.stem.empty() || o.stem[0] == '.' || o.stem.find('/') != std::string::npos) {
    return Status(Code::usage, "not a name for a vault: " + json_quote(o.stem), "use letters, digits, - and .");
  }
  for (const RecordGroup& g : o.layers) {
    if (g.experts > 0 && g.record_bytes > 0 && g.record_bytes % kRecordAlignment == 0) continue;
    return Status(Code::usage, "layer " + std::to_string(g.layer) + ": " + std::to_string(g.experts) + " records of " +
                                   std::to_string(g.record_bytes) + " bytes; a record is a multiple of 16384 bytes");
  }
  return Status::ok();
}

Status remove_parts(const VaultNames& names) {
  SMOE_TRY(remove_file(names.smoe_part));
  SMOE_TRY(remove_file(names.scout_part));
  return remove_folder(names.tokenizer_part);
}

Status closed() { return Status(Code::usage, "the vault writer is closed"); }

}  // namespace

VaultNames::VaultNames(const std::string& dir, const std::string& stem)
    : folder(dir.empty() ? "." : dir),
      smoe(folder + "/" + stem + ".smoe"),
      scout(folder + "/" + stem + ".scout.safetensors"),
      tokenizer(folder + "/" + stem + ".tokenizer"),
      smoe_part(smoe + ".part"),
      scout_part(scout + ".part"),
      tokenizer_part(tokenizer + ".part"),
      journal(folder + "/" + stem + ".convert.part") {}

Result<std::unique_ptr<VaultWriter>> VaultWriter::open(WriterOptions options) {
  SMOE_TRY(check_options(options));
  SMOE_ASSIGN(scout::Layout layout, scout::lay_out(options.trunk));
  SMOE_TRY(create_folder(options.folder));
  SMOE_ASSIGN(Journal journal, Journal::open(VaultNames(options.folder, options.stem).journal));
  std::unique_ptr<VaultWriter> writer(new VaultWriter(std::move(options), std::move(layout), std::move(journal)));
  SMOE_TRY(writer->start());
  return writer;
}

VaultWriter::VaultWriter(WriterOptions options, scout::Layout layout, Journal journal)
    : options_(std::move(options)),
      names_(options_.folder, options_.stem),
      scout_(std::move(layout)),
      journal_(std::move(journal)),
      last_sync_ms_(now_ms()) {
  uint64_t offset = format::kRecordsOffset;
  for (const RecordGroup& group : options_.layers) {
    first_record_.push_back(records_.size());
    for (uint32_t e = 0; e < group.experts; ++e, offset += group.record_bytes) {
      records_.push_back({offset, group.record_bytes});
    }
  }
  for (const scout::Tensor& tensor : options_.trunk) {
    tensor_index_[tensor.name] = tensors_.size();
    const TrunkEntry& entry = scout_.entries.at(tensor.name);
    tensors_.push_back({entry.offset, entry.bytes});
  }
}

Status VaultWriter::start() {
  SMOE_ASSIGN(const auto contents, journal_.read());
  if (!options_.resume || !contents) return start_fresh();
  if (contents->fingerprint != options_.fingerprint) {
    return Status(Code::usage,
                  names_.journal + ": this conversion was begun from the source " + contents->fingerprint +
                      ", which is now " + options_.fingerprint,
                  "pass --fresh to begin again");
  }
  if (contents->geometry != geometry_json(options_)) {
    return Status(Code::usage, names_.journal + ": this conversion was begun with other encodings or tensors",
                  "pass --fresh to begin again, or give the options it was begun with");
  }
  return take_back(*contents);
}

Status VaultWriter::start_fresh() {
  SMOE_TRY(remove_parts(names_));
  SMOE_TRY(journal_.begin(options_.fingerprint, geometry_json(options_)));
  const Status opened = open_parts();
  if (opened.is_ok()) return opened;
  (void)remove_parts(names_);  // nothing is lost, and a full disk gets its room back
  (void)journal_.remove();
  return opened;
}

Status VaultWriter::open_parts() {
  SMOE_ASSIGN(smoe_part_, File::open_write(names_.smoe_part));
  SMOE_ASSIGN(scout_part_, File::open_write(names_.scout_part));
  smoe_direct_ = File::open_direct(names_.smoe_part);
  const uint64_t records_end =
      records_.empty() ? format::kRecordsOffset : records_.back().offset + records_.back().bytes;
  SMOE_TRY(smoe_part_.reserve(records_end));
  SMOE_TRY(scout_part_.reserve(scout_.file_bytes));
  SMOE_TRY(scout_part_.resize(scout_.file_bytes));
  return scout_part_.write_at(0, scout_.header.data(), scout_.header.size());
}

// If the earlier run was stopped while it took the final names, they are given back first, the .smoe before its scout.
Status VaultWriter::take_back(const JournalContents& contents) {
  journal_.resume(contents);
  if (contents.finishing && !file_exists(names_.smoe_part) && file_exists(names_.smoe)) {
    SMOE_ASSIGN(const File smoe, File::open_read(names_.smoe));
    format::HeaderBytes header{};
    const bool ours = smoe.read_at(0, header.data(), header.size()).is_ok() &&
                      crc32c(header.data(), header.size()) == *contents.finishing;
    if (ours) SMOE_TRY(rename_file(names_.smoe, names_.smoe_part));
  }
  if (contents.finishing && !file_exists(names_.scout_part) && file_exists(names_.scout) && !file_exists(names_.smoe)) {
    SMOE_TRY(rename_file(names_.scout, names_.scout_part));
  }
  SMOE_TRY(open_parts());
  return verify_done(contents);
}

Status VaultWriter::verify_done(const JournalContents& contents) {
  smoe_part_.drop_cache();
  scout_part_.drop_cache();
  for (const auto& [item, crc] : contents.records) {
    if (item < records_.size()) SMOE_TRY(check_item(smoe_part_, &records_[item], crc));
  }
  for (const auto& [item, crc] : contents.tensors) {
    if (item < tensors_.size()) SMOE_TRY(check_item(scout_part_, &tensors_[item], crc));
  }
  return Status::ok();
}

Status VaultWriter::check_item(const File& file, Item* item, uint32_t crc) const {
  std::vector<uint8_t> piece(std::min<uint64_t>(item->bytes, 1 << 20));
  item->crc = 0;
  for (uint64_t done = 0; done < item->bytes; done += piece.size()) {
    const uint64_t n = std::min<uint64_t>(piece.size(), item->bytes - done);
    SMOE_TRY(file.read_at(item->offset + done, piece.data(), n));
    item->crc = crc32c(piece.data(), n, item->crc);
  }
  item->done = item->crc == crc;
  return Status::ok();
}

std::vector<std::pair<uint32_t, uint32_t>> VaultWriter::done_records() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<uint32_t, uint32_t>> out;
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    for (uint32_t e = 0; e < options_.layers[l].experts; ++e) {
      if (records_[first_record_[l] + e].done) out.emplace_back(static_cast<uint32_t>(l), e);
    }
  }
  return out;
}

std::vector<std::string> VaultWriter::done_tensors() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> out;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].done) out.push_back(options_.trunk[i].name);
  }
  return out;
}

Status VaultWriter::write_record(uint32_t moe_layer, uint32_t expert, const void* data, uint64_t bytes) {
  if (moe_layer >= options_.layers.size() || expert >= options_.layers[moe_layer].experts) {
    return Status(Code::usage,
                  "there is no expert " + std::to_string(expert) + " in MoE layer " + std::to_string(moe_layer));
  }
  const uint64_t index = first_record_[moe_layer] + expert;
  const uint64_t offset = records_[index].offset, length = options_.layers[moe_layer].record_bytes;
  if (bytes > length || length - bytes >= kRecordAlignment) {
    return Status(Code::usage,
                  "a record of " + std::to_string(bytes) + " bytes does not fill " + std::to_string(length));
  }
  const std::shared_lock life(life_);
  if (!open_) return closed();
  forget(&records_[index]);
  SMOE_TRY(put_record(offset, data, bytes, length));
  const uint32_t crc = crc32c(kZeros.data(), length - bytes, crc32c(data, bytes));
  return note(true, index, crc, length);
}

// What a direct write refuses or leaves half done is written again through the page cache; a full disk is full for
// both.
Status VaultWriter::put_record(uint64_t offset, const void* data, uint64_t bytes, uint64_t length) const {
  const bool aligned = reinterpret_cast<uintptr_t>(data) % kDirectAlignment == 0;
  if (smoe_direct_.is_open() && aligned && bytes == length) {
    const Status status = smoe_direct_.write_at(offset, data, bytes);
    if (status.is_ok() || status.code() != Code::io) return status;
  }
  SMOE_TRY(smoe_part_.write_at(offset, data, bytes));
  return smoe_part_.write_at(offset + bytes, kZeros.data(), length - bytes);
}

Status VaultWriter::write_tensor(const std::string& name, const void* data, uint64_t bytes) {
  const auto index = tensor_index_.find(name);
  if (index == tensor_index_.end()) return Status(Code::usage, "there is no tensor " + name + " in this vault");
  const TrunkEntry& entry = scout_.entries.at(name);
  if (bytes != entry.bytes) {
    return Status(Code::usage,
                  "tensor " + name + " has " + std::to_string(entry.bytes) + " bytes, not " + std::to_string(bytes));
  }
  const std::shared_lock life(life_);
  if (!open_) return closed();
  forget(&tensors_[index->second]);
  SMOE_TRY(scout_part_.write_at(entry.offset, data, bytes));
  return note(false, index->second, crc32c(data, bytes), bytes);
}

// While an item is written again, what was known of it no longer holds.
void VaultWriter::forget(Item* item) {
  const std::lock_guard lock(mutex_);
  item->done = false;
}

// The bytes are in the file; only then does the journal say so, so that a kill between the two redoes the item.
Status VaultWriter::note(bool is_record, uint64_t index, uint32_t crc, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  SMOE_TRY(is_record ? journal_.record(index, crc) : journal_.tensor(index, crc));
  Item& item = (is_record ? records_ : tensors_)[index];
  item.crc = crc;
  item.done = true;
  unsynced_bytes_ += bytes;
  if (unsynced_bytes_ < kSyncBytes && now_ms() - last_sync_ms_ < kSyncMs) return Status::ok();
  return sync_parts();
}

Status VaultWriter::sync_parts() {
  SMOE_TRY(smoe_part_.sync_data());
  SMOE_TRY(scout_part_.sync_data());
  SMOE_TRY(journal_.sync());
  unsynced_bytes_ = 0;
  last_sync_ms_ = now_ms();
  return Status::ok();
}

Result<uint32_t> VaultWriter::tensor_crc(const std::string& name) const {
  const auto index = tensor_index_.find(name);
  const std::lock_guard lock(mutex_);
  if (index == tensor_index_.end() || !tensors_[index->second].done) {
    return Status(Code::usage, "tensor " + name + " is not written yet");
  }
  return tensors_[index->second].crc;
}

uint32_t VaultWriter::scout_header_crc() const { return crc32c(scout_.header.data(), scout_.header.size()); }

Status VaultWriter::finish(const std::string& manifest_json) {
  const std::unique_lock life(life_);
  if (!open_) return closed();
  SMOE_TRY(check_complete());
  uint32_t header_crc = 0;
  SMOE_TRY(append_tail(manifest_json, &header_crc));
  SMOE_TRY(check_parts());
  open_ = false;
  const Status status = take_names(header_crc);
  smoe_part_.close();
  smoe_direct_.close();
  scout_part_.close();
  return status;
}

Status VaultWriter::check_complete() const {
  const auto missing = [](const std::vector<Item>& items) {
    return std::count_if(items.begin(), items.end(), [](const Item& item) { return !item.done; });
  };
  const auto records = missing(records_), tensors = missing(tensors_);
  if (records == 0 && tensors == 0) return Status::ok();
  return Status(Code::usage,
                std::to_string(records) + " records and " + std::to_string(tensors) + " tensors are not written yet");
}

Status VaultWriter::append_tail(const std::string& manifest_json, uint32_t* header_crc) {
  std::vector<std::vector<ExpertRecord>> records;
  std::vector<uint32_t> layers;
  for (size_t l = 0; l < options_.layers.size(); ++l) {
    layers.push_back(options_.layers[l].layer);
    auto& list = records.emplace_back();
    for (uint32_t e = 0; e < options_.layers[l].experts; ++e) {
      const Item& item = records_[first_record_[l] + e];
      list.push_back({item.offset, item.bytes, item.crc});
    }
  }
  const std::vector<uint8_t> table = format::encode_table(records, layers);
  format::Header h;
  h.table_offset = records_.empty() ? format::kRecordsOffset : records_.back().offset + records_.back().bytes;
  h.records_bytes = h.table_offset - format::kRecordsOffset;
  h.table_bytes = table.size();
  h.manifest_offset = h.table_offset + h.table_bytes;
  h.manifest_bytes = manifest_json.size();
  h.file_bytes = h.manifest_offset + h.manifest_bytes;
  h.table_crc = crc32c(table.data(), table.size());
  h.manifest_crc = crc32c(manifest_json.data(), manifest_json.size());
  h.expert_count = records_.size();
  h.moe_layers = static_cast<uint32_t>(layers.size());
  const format::HeaderBytes header = format::encode_header(h);
  *header_crc = crc32c(header.data(), header.size());
  SMOE_TRY(smoe_part_.write_at(h.table_offset, table.data(), table.size()));
  SMOE_TRY(smoe_part_.write_at(h.manifest_offset, manifest_json.data(), manifest_json.size()));
  SMOE_TRY(smoe_part_.resize(h.file_bytes));
  SMOE_TRY(smoe_part_.write_at(format::kHeaderBytes, kZeros.data(), format::kRecordsOffset - format::kHeaderBytes));
  SMOE_TRY(smoe_part_.write_at(0, header.data(), header.size()));
  SMOE_TRY(smoe_part_.sync());
  return scout_part_.sync();
}

// The parts as an engine would open them. A manifest that does not fit what was written is found here.
Status VaultWriter::check_parts() const {
  SMOE_ASSIGN(const VaultFile vault, open_vault(names_.smoe_part, names_.scout_part));
  for (const auto& [name, spec] : vault.model.tensors) {
    if (spec.crc32c == tensors_[tensor_index_.at(name)].crc) continue;
    return Status(Code::corrupt, names_.smoe_part + ": the manifest's crc32c of " + name + " is not that of its bytes");
  }
  return Status::ok();
}

Status VaultWriter::take_names(uint32_t header_crc) {
  const bool tokenizer = file_exists(names_.tokenizer_part);
  if (tokenizer) SMOE_TRY(sync_tree(names_.tokenizer_part));
  SMOE_TRY(journal_.finishing(header_crc));
  SMOE_TRY(remove_file(names_.smoe));
  SMOE_TRY(sync_folder(names_.folder));
  if (tokenizer) {
    SMOE_TRY(remove_folder(names_.tokenizer));
    SMOE_TRY(rename_file(names_.tokenizer_part, names_.tokenizer));
  }
  SMOE_TRY(rename_file(names_.scout_part, names_.scout));
  SMOE_TRY(sync_folder(names_.folder));
  SMOE_TRY(rename_file(names_.smoe_part, names_.smoe));
  SMOE_TRY(sync_folder(names_.folder));
  SMOE_TRY(journal_.remove());
  return sync_folder(names_.folder);
}

void VaultWriter::close() {
  const std::unique_lock life(life_);
  open_ = false;
  smoe_part_.close();
  smoe_direct_.close();
  scout_part_.close();
  journal_.close();
}

Status discard_parts(const std::string& folder, const std::string& stem) {
  const VaultNames names(folder, stem);
  if (!file_exists(names.folder)) return Status::ok();
  SMOE_ASSIGN(Journal journal, Journal::open(names.journal));
  SMOE_TRY(remove_parts(names));
  SMOE_TRY(journal.remove());
  return sync_folder(names.folder);
}

}  // namespace smoe
