// The trunk as one stream: large direct reads in the order of the file into a few pieces of memory, copied from there
// to where each tensor is wanted while the next ones are read. Through the page cache the same bytes took twice as
// long: its pages had to be found first (LEARNED.md, 2026-11-30-trunk-stream).
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "io/reader.h"
#include "util/aligned_buffer.h"
#include "vault/file.h"
#include "vault/vault.h"

namespace smoe {
namespace {

constexpr uint64_t kPieceBytes = 2 << 20;
constexpr uint32_t kPieces = 4;         // on their way
constexpr uint64_t kNearby = 1 << 20;   // bytes between two tensors that are read with them
constexpr uint64_t kCopied = 64 << 10;  // checksummed while it is still in the CPU's cache

struct Wanted {
  std::string name;
  uint64_t begin = 0, end = 0;  // in the file
  uint8_t* to = nullptr;
  uint32_t expected_crc = 0, crc = 0;
};

struct Range {
  uint64_t begin = 0, end = 0;
};

// Takes the bytes of the file in ascending order.
class Sink {
 public:
  Sink(const VaultFile& vault, std::vector<Wanted> wanted) : vault_(vault), wanted_(std::move(wanted)) {}

  Status take(uint64_t offset, const uint8_t* data, uint64_t bytes) {
    for (; next_ < wanted_.size(); ++next_) {
      Wanted& w = wanted_[next_];
      const uint64_t begin = std::max(w.begin, offset), end = std::min(w.end, offset + bytes);
      for (uint64_t at = begin; at < end; at += kCopied) {
        const uint64_t n = std::min(kCopied, end - at);
        std::memcpy(w.to + (at - w.begin), data + (at - offset), n);
        w.crc = crc32c(w.to + (at - w.begin), n, w.crc);
      }
      if (offset + bytes < w.end) break;  // more of it is to come
      if (w.crc != w.expected_crc) {
        return {Code::corrupt, vault_.scout_path + ": the checksum of tensor " + w.name + " is wrong",
                "the file is damaged: copy it again, or convert the model again"};
      }
    }
    return Status::ok();
  }

  // What has to be read for it, in whole blocks, the last of the file excepted.
  std::vector<Range> ranges() const {
    std::vector<Range> all;
    for (const Wanted& w : wanted_) {
      if (w.begin == w.end) continue;
      const uint64_t begin = w.begin / kIoAlignment * kIoAlignment;
      const uint64_t end = std::min((w.end + kIoAlignment - 1) / kIoAlignment * kIoAlignment, vault_.scout_bytes);
      if (!all.empty() && begin <= all.back().end + kNearby) {
        all.back().end = std::max(all.back().end, end);
      } else {
        all.push_back({begin, end});
      }
    }
    return all;
  }

 private:
  const VaultFile& vault_;
  std::vector<Wanted> wanted_;  // in the order of the file
  size_t next_ = 0;
};

// Pieces of whole blocks through the reader, handed on in order.
Status stream(Reader& reader, uint8_t* memory, const std::vector<Range>& pieces, Sink* sink) {
  std::vector<bool> here(pieces.size(), false);
  const auto place = [&](size_t i) { return memory + i % kPieces * kPieceBytes; };
  size_t asked = 0;
  const auto ask = [&] {
    const Range& piece = pieces[asked];
    reader.submit({piece.begin, piece.end - piece.begin, place(asked), asked});
    ++asked;
  };
  while (asked < std::min<size_t>(kPieces, pieces.size())) ask();
  for (size_t i = 0; i < pieces.size(); ++i) {
    while (!here[i]) {
      const ReadCompletion completion = reader.wait();
      SMOE_TRY(completion.status);
      here[completion.tag] = true;
    }
    SMOE_TRY(sink->take(pieces[i].begin, place(i), pieces[i].end - pieces[i].begin));
    if (asked < pieces.size()) ask(), reader.flush();
  }
  return Status::ok();
}

}  // namespace

Status read_trunk(const VaultFile& vault, ReaderOptions how, const TrunkPlaces& places) {
  std::vector<Wanted> wanted;
  for (const auto& [name, to] : places) {
    const auto entry = vault.trunk.find(name);
    const auto spec = vault.model.tensors.find(name);
    if (entry == vault.trunk.end() || spec == vault.model.tensors.end()) {
      return {Code::usage, vault.scout_path + ": has no tensor " + name};
    }
    const auto [offset, bytes] = entry->second;
    wanted.push_back({name, offset, offset + bytes, to, spec->second.crc32c});
  }
  std::sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) { return a.begin < b.begin; });
  Sink sink(vault, std::move(wanted));
  std::vector<Range> pieces;
  Range rest;  // the end of the file, if it is no whole block
  for (const Range& range : sink.ranges()) {
    const uint64_t whole = range.end / kIoAlignment * kIoAlignment;
    for (uint64_t at = range.begin; at < whole; at += kPieceBytes)
      pieces.push_back({at, std::min(at + kPieceBytes, whole)});
    if (whole < range.end) rest = {whole, range.end};
  }
  if (!pieces.empty()) {
    SMOE_ASSIGN(AlignedBuffer memory, AlignedBuffer::allocate(kPieces * kPieceBytes));
    how.slots = {memory.data(), kPieceBytes, kPieces};
    SMOE_ASSIGN(const std::unique_ptr<Reader> reader, open_reader(vault.scout_path, how, nullptr));
    SMOE_TRY(stream(*reader, memory.data(), pieces, &sink));
  }
  if (rest.end == rest.begin) return Status::ok();
  uint8_t last[kIoAlignment];
  SMOE_ASSIGN(const File file, File::open_read(vault.scout_path));
  SMOE_TRY(file.read_at(rest.begin, last, rest.end - rest.begin));
  return sink.take(rest.begin, last, rest.end - rest.begin);
}

}  // namespace smoe
