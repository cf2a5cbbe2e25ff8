// A structure-aware fuzzer of everything that reads a vault: builds a small valid one, damages it in ways that keep the
// checksums right so that the deeper code is reached, and opens, reads and verifies the result. No damage may crash,
// hang, take much memory, lead outside the files, or, where the checksums were not repaired, go unnoticed.
//
//   fuzz_vault [--seed N] [--runs N] [--seconds N] [--folder DIR]
//
// Deterministic: case i of a run depends on seed + i only, and a failure names the seed that repeats it with --runs 1.
// Build with -DSMOE_TESTS=ON -DSMOE_SANITIZE=address,undefined. Exit codes: 0 nothing found, 1 something found, 2
// usage.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "../tests/engine/tiny_vault.h"
#include "fuzz.h"
#include "util/json.h"
#include "vault/format.h"
#include "vault/vault.h"

using namespace smoe;
using fuzz::Progress;
using fuzz::Random;

namespace {

const std::vector<std::string> kNumbers = {"0",
                                           "1",
                                           "-1",
                                           "2",
                                           "3",
                                           "16",
                                           "31",
                                           "255",
                                           "4096",
                                           "16383",
                                           "16384",
                                           "16385",
                                           "0.5",
                                           "-0",
                                           "-0.0",
                                           "65535",
                                           "65536",
                                           "131072",
                                           "1048577",
                                           "2147483647",
                                           "2e3",
                                           "1e308",
                                           "1e999",
                                           "1e-320",
                                           "NaN",
                                           "2147483648",
                                           "4294967295",
                                           "4294967296",
                                           "9223372036854775807",
                                           "9223372036854775808",
                                           "18446744073709551615",
                                           "18446744073709551616",
                                           "01",
                                           "null",
                                           "true",
                                           "[]",
                                           "{}",
                                           "\"\""};
const std::vector<std::string> kWords = {
    "f32",         "f16",           "bf16",   "q8_0",         "q4_0",        "q4_k",
    "q6_k",        "mlx4_g64_bf16", "q3_k",   "rows",         "panel16",     "moe",
    "ffn",         "gqa",           "mla",    "none",         "head",        "full",
    "silu",        "gelu",          "F32",    "F16",          "BF16",        "U8",
    "I64",         "experts",       "top_k",  "rope",         "shape",       "dtype",
    "tensors",     "scout",         "layers", "embed.weight", "head.weight", "../../etc/passwd",
    "__metadata__"};

// Where the tokens of a JSON text begin: strings, numbers and words, punctuation.
std::vector<size_t> token_starts(const std::string& text) {
  std::vector<size_t> starts;
  for (size_t i = 0; i < text.size();) {
    starts.push_back(i);
    if (text[i] == '"') {
      const size_t end = text.find('"', i + 1);
      i = end == std::string::npos ? text.size() : end + 1;
    } else if (std::strchr("{}[],: \n", text[i]) != nullptr) {
      ++i;
    } else {
      i = std::min(text.find_first_of("{}[],: \n\"", i), text.size());
    }
  }
  starts.push_back(text.size());
  return starts;
}

void replace_token(Random& r, std::string* text, const std::vector<size_t>& at) {
  const bool number = r.one_in(2);
  for (int tries = 0; tries < 50; ++tries) {  // a token of the wanted kind, if one comes up
    const size_t t = r.below(at.size() - 1);
    const char c = (*text)[at[t]];
    if (number ? !(c == '-' || (c >= '0' && c <= '9')) : c != '"') continue;
    const std::string with = number ? r.pick(kNumbers) : '"' + r.pick(kWords) + '"';
    text->replace(at[t], at[t + 1] - at[t], with);
    return;
  }
}

void mutate_json(Random& r, std::string* text) {
  const std::vector<size_t> at = token_starts(*text);
  if (at.size() < 2) return;
  const size_t from = r.below(at.size() - 1);
  const size_t to = std::min(at.size() - 1, from + 1 + r.below(r.one_in(4) ? 200 : 12));
  const std::string span = text->substr(at[from], at[to] - at[from]);
  switch (r.below(10)) {
    case 0:
      text->erase(at[from], span.size());
      break;
    case 1:
      text->insert(at[from], span);
      break;
    case 2:
      text->insert(at[r.below(at.size())], span);
      break;
    case 3:
      (*text)[r.below(text->size())] = static_cast<char>(r.next());
      break;
    case 4:
      text->insert(at[from], std::string(1 + r.below(200), r.one_in(2) ? '[' : '{'));
      break;
    case 5:
      text->resize(r.below(text->size()));
      break;
    default:
      replace_token(r, text, at);
  }
}

void mutate_bytes(Random& r, std::string* bytes) {
  if (bytes->empty()) return;
  for (uint64_t n = 1 + r.below(8); n > 0; --n) {
    (*bytes)[r.below(bytes->size())] ^= static_cast<char>(1 << r.below(8));
  }
}

void mutate_length(Random& r, std::string* bytes, uint64_t unit) {
  const uint64_t by = r.one_in(3) ? 1 + r.below(64) : unit * (1 + r.below(3));
  if (r.one_in(2)) {
    bytes->resize(bytes->size() - std::min<uint64_t>(by, bytes->size()));
  } else {
    bytes->append(by, static_cast<char>(r.below(2)));
  }
}

void put(std::string* bytes, size_t at, uint64_t value, size_t width) {
  for (size_t i = 0; i < width && at + i < bytes->size(); ++i) (*bytes)[at + i] = static_cast<char>(value >> (8 * i));
}

uint64_t interesting(Random& r, uint64_t near) {
  switch (r.below(6)) {
    case 0:
      return near + 1;
    case 1:
      return near - 1;
    case 2:
      return near ^ (uint64_t{1} << r.below(64));
    case 3:
      return uint64_t{1} << r.below(64);
    case 4:
      return UINT64_MAX - r.below(20000);
    default:
      return r.below(70000);
  }
}

// The two files taken apart; put together again with lengths and checksums that fit.
struct Pieces {
  std::string records, table, manifest, scout_json, scout_data;
};

struct Files {
  std::string smoe, scout;
};

Pieces take_apart(const std::string& folder) {
  Result<VaultFile> opened = open_vault(folder + "/tiny.smoe");
  if (!opened.is_ok()) std::abort();
  const VaultFile& vault = *opened;
  const std::string smoe = tiny::read_file(vault.path), scout = tiny::read_file(vault.scout_path);
  const size_t manifest = smoe.size() - vault.manifest_json.size();
  const size_t table = manifest - tiny::kExperts * format::kEntryBytes;
  const size_t data = vault.trunk.at("final_norm.weight").offset;
  return {smoe.substr(format::kRecordsOffset, table - format::kRecordsOffset), smoe.substr(table, manifest - table),
          vault.manifest_json, scout.substr(8, data - 8), scout.substr(data)};
}

void repair_scout_entry(const std::string& scout, size_t header_bytes, std::string* manifest) {
  const size_t from = manifest->find("\"scout\":{"), to = manifest->find('}', from);
  if (from == std::string::npos || to == std::string::npos) return;
  const uint32_t crc = crc32c(scout.data(), header_bytes);
  const std::string entry =
      "\"scout\":{\"bytes\":" + std::to_string(scout.size()) + ",\"header_crc32c\":" + std::to_string(crc);
  manifest->replace(from, to - from, entry);
}

Files put_together(Pieces p) {
  Files out;
  out.scout.assign(8, '\0');
  put(&out.scout, 0, p.scout_json.size(), 8);
  out.scout += p.scout_json + p.scout_data;
  repair_scout_entry(out.scout, 8 + p.scout_json.size(), &p.manifest);
  format::Header h;
  h.records_bytes = p.records.size();
  h.table_offset = format::kRecordsOffset + p.records.size();
  h.table_bytes = p.table.size();
  h.manifest_offset = h.table_offset + h.table_bytes;
  h.manifest_bytes = p.manifest.size();
  h.file_bytes = h.manifest_offset + h.manifest_bytes;
  h.table_crc = crc32c(p.table.data(), p.table.size());
  h.manifest_crc = crc32c(p.manifest.data(), p.manifest.size());
  h.expert_count = p.table.size() / format::kEntryBytes;
  h.moe_layers = 1;
  const format::HeaderBytes header = format::encode_header(h);
  out.smoe.assign(header.begin(), header.end());
  out.smoe.resize(format::kRecordsOffset);
  out.smoe += p.records + p.table + p.manifest;
  return out;
}

void mutate_pieces(Random& r, Pieces* p) {
  for (uint64_t n = 1 + r.below(3); n > 0; --n) {
    switch (r.below(8)) {
      case 0:
      case 1:
      case 2:
        mutate_json(r, &p->manifest);
        break;
      case 3:
      case 4:
        mutate_json(r, &p->scout_json);
        break;
      case 5:
        if (p->table.size() >= 8) {
          const size_t at = 4 * r.below(p->table.size() / 4 - 1);
          uint64_t old = 0;
          std::memcpy(&old, p->table.data() + at, 8);
          put(&p->table, at, interesting(r, old), r.one_in(2) ? 4 : 8);
        }
        break;
      case 6:
        mutate_length(r, r.one_in(2) ? &p->records : &p->table, r.one_in(2) ? 16384 : 32);
        break;
      default:
        mutate_length(r, &p->scout_data, 4096);
    }
  }
}

void mutate_header(Random& r, std::string* smoe) {
  if (smoe->size() < format::kHeaderBytes) return;
  const size_t at = r.one_in(8) ? r.below(format::kHeaderBytes - 8) : 4 * r.below(24);
  uint64_t old = 0;
  std::memcpy(&old, smoe->data() + at, 8);
  put(smoe, at, interesting(r, old), r.one_in(2) ? 4 : 8);
  put(smoe, format::kHeaderBytes - 4, crc32c(smoe->data(), format::kHeaderBytes - 4), 4);
}

class Fuzzer {
 public:
  Fuzzer(std::string folder, Progress* progress) : folder_(std::move(folder)), progress_(progress) {
    if (tiny::make(folder_).empty()) std::abort();
    base_ = take_apart(folder_);
    whole_ = put_together(base_);
    if (whole_.smoe != tiny::read_file(smoe()) || whole_.scout != tiny::read_file(scout()))
      fail("cannot rebuild the vault");
  }

  void run(uint64_t seed) {
    Random r(seed);
    if (r.one_in(16)) return resume_from_damage(r);
    Files files = whole_;
    const bool plain_damage = r.one_in(4);
    if (plain_damage) {
      mutate_bytes(r, r.one_in(2) ? &files.smoe : &files.scout);
      if (r.one_in(4)) mutate_length(r, r.one_in(2) ? &files.smoe : &files.scout, 4096);
    } else {
      Pieces pieces = base_;
      if (!r.one_in(5)) mutate_pieces(r, &pieces);
      (void)parse_manifest(pieces.manifest);
      files = put_together(std::move(pieces));
      if (r.one_in(3)) mutate_header(r, &files.smoe);
      if (r.one_in(10)) mutate_length(r, r.one_in(2) ? &files.smoe : &files.scout, 4096);
    }
    tiny::write_file(smoe(), files.smoe);
    tiny::write_file(scout(), files.scout);
    const bool damaged = files.smoe != whole_.smoe || files.scout != whole_.scout;
    read_all(files, plain_damage && damaged);
  }

 private:
  std::string smoe() const { return folder_ + "/tiny.smoe"; }
  std::string scout() const { return folder_ + "/tiny.scout.safetensors"; }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
  }

  void read_all(const Files& files, bool must_be_noticed) {
    Result<VaultFile> vault = open_vault(smoe());
    if (vault.is_ok()) {
      ++progress_->accepted;
      for (const auto& layer : vault->records) {
        for (const ExpertRecord& record : layer) {
          if (record.offset + record.length > files.smoe.size()) fail("a record reaches outside the file");
        }
      }
      for (const auto& [name, entry] : vault->trunk) {
        if (entry.offset + entry.bytes > files.scout.size()) fail("a tensor reaches outside the file");
        std::vector<uint8_t> bytes(entry.bytes);
        (void)read_trunk(*vault, {}, {{name, bytes.data()}});
      }
    } else if (vault.status().message().empty() || vault.status().hint().empty()) {
      fail("an error without words");
    }
    const VerifyReport report = verify_vault(smoe(), nullptr);
    if (report.ok() && !vault.is_ok()) fail("verified, but cannot be opened");
    if (report.ok() && must_be_noticed) fail("damage that verify does not notice");
  }

  // A conversion stopped half-way, its journal and parts damaged: the writer opens, finishes, and the vault is right.
  void resume_from_damage(Random& r) {
    const std::string folder = folder_ + "/resume";
    tiny::fs::remove_all(folder);
    const WriterOptions o = tiny::options(folder);
    {
      auto writer = VaultWriter::open(o);
      if (!writer.is_ok() || !tiny::fill(**writer, o).is_ok()) fail("cannot write a vault");
    }
    for (const char* part : {"/tiny.convert.part", "/tiny.smoe.part", "/tiny.scout.safetensors.part"}) {
      if (r.one_in(2)) continue;
      std::string bytes = tiny::read_file(folder + part);
      if (r.one_in(2)) mutate_bytes(r, &bytes);
      if (r.one_in(2)) mutate_length(r, &bytes, 4096);
      tiny::write_file(folder + part, bytes);
    }
    auto writer = VaultWriter::open(o);
    if (!writer.is_ok()) fail(writer.status().message().c_str());
    if (!tiny::fill(**writer, o, true).is_ok()) fail("cannot fill a resumed vault");
    tiny::write_tokenizer(folder + "/tiny.tokenizer.part");
    if (const Status s = (*writer)->finish(tiny::manifest_for(**writer)); !s.is_ok()) fail(s.message().c_str());
    if (!verify_vault(folder + "/tiny.smoe", nullptr).ok()) fail("a resumed vault is not right");
    if (tiny::read_file(folder + "/tiny.smoe") != whole_.smoe) fail("a resumed vault differs");
  }

  std::string folder_;
  Progress* progress_;
  Pieces base_;
  Files whole_;
};

}  // namespace

int main(int argc, char** argv) {
  return fuzz::run(argc, argv, "fuzz_vault", [](const std::string& folder, fuzz::Progress* progress) {
    return [fuzzer = std::make_shared<Fuzzer>(folder, progress)](uint64_t seed) { fuzzer->run(seed); };
  });
}
