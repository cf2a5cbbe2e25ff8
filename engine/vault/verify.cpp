// Verification: every byte of the three parts is held against a checksum, or against zero. Header, table, manifest and
// the scout's header are checked by opening; here come the gap, the records, the trunk tensors and the tokenizer files.
#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include "util/fields.h"
#include "util/sha256.h"
#include "vault/file.h"
#include "vault/format.h"
#include "vault/vault.h"

namespace smoe {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kPiece = 1 << 20;
constexpr size_t kMostErrors = 100;

struct TokenizerFile {
  std::string name, sha256;
  uint64_t bytes = 0;
};

// A file name inside the tokenizer folder: relative, and it stays in there.
bool is_inside(const std::string& name) {
  if (name.empty() || name.front() == '/' || name.find('\0') != std::string::npos) return false;
  const fs::path path(name);
  return std::none_of(path.begin(), path.end(), [](const fs::path& part) { return part == ".." || part == "."; });
}

Result<std::vector<TokenizerFile>> tokenizer_files(const std::string& manifest) {
  SMOE_ASSIGN(const Json json, Json::parse(manifest));
  SMOE_ASSIGN(const Fields top, Fields::of(json, ""));
  SMOE_ASSIGN(const Fields tokenizer, top.object("tokenizer"));
  SMOE_ASSIGN(const Fields files, tokenizer.object("files"));
  std::vector<TokenizerFile> out;
  for (const auto& [name, value] : files.json().members()) {
    if (!is_inside(name)) return files.bad(json_quote(name), "is not a name inside the tokenizer folder");
    SMOE_ASSIGN(const Fields fields, Fields::of(value, files.name(name)));
    TokenizerFile& file = out.emplace_back();
    file.name = name;
    SMOE_TRY(fields.u64("bytes", 0, uint64_t{1} << 40, &file.bytes));
    SMOE_TRY(fields.string("sha256", &file.sha256));
  }
  return out;
}

class Verifier {
 public:
  Verifier(VerifyReport* report, const std::function<bool(uint64_t, uint64_t)>& progress)
      : report_(report), progress_(progress), buffer_(kPiece) {}

  void run(const std::string& path) {
    Result<VaultFile> vault = open_vault(path);
    if (!vault.is_ok()) return error(vault.status().message());
    Result<std::vector<TokenizerFile>> tokenizer = tokenizer_files(vault->manifest_json);
    if (!tokenizer.is_ok()) return error(path + ": manifest: " + tokenizer.status().message());
    total_ = vault->file_bytes + vault->scout_bytes;
    for (const TokenizerFile& file : *tokenizer) total_ += file.bytes;
    const bool finished = records(*vault) && trunk(*vault) && tokenizer_folder(vault->tokenizer_dir, *tokenizer);
    if (!finished) error(path + ": stopped before every byte was checked");
  }

 private:
  void error(const std::string& what) {
    if (report_->errors.size() < kMostErrors) return report_->errors.push_back(what);
    if (report_->errors.size() == kMostErrors) report_->errors.push_back("and more");
  }

  bool count(uint64_t bytes) {
    report_->checked_bytes += bytes;
    return !progress_ || progress_(report_->checked_bytes, total_);
  }

  // Hands the bytes of [offset, offset + bytes) to `take`, piece by piece. False: stop. A read error ends this part
  // only.
  template <class Take>
  bool each_piece(const File& file, uint64_t offset, uint64_t bytes, bool* whole, Take&& take) {
    *whole = false;
    for (uint64_t done = 0; done < bytes; done += kPiece) {
      const uint64_t n = std::min(kPiece, bytes - done);
      if (const Status s = file.read_at(offset + done, buffer_.data(), n); !s.is_ok()) {
        error(s.message());
        return true;
      }
      take(buffer_.data(), n);
      if (!count(n)) return false;
    }
    *whole = true;
    return true;
  }

  bool check_crc(const File& file, uint64_t offset, uint64_t bytes, uint32_t want, const std::string& what) {
    uint32_t crc = 0;
    bool whole = false;
    const bool go_on =
        each_piece(file, offset, bytes, &whole, [&](const uint8_t* p, uint64_t n) { crc = crc32c(p, n, crc); });
    if (whole && crc != want) {
      error(file.path() + ": " + what + ", at byte " + std::to_string(offset) + ": its checksum is wrong");
    }
    return go_on;
  }

  bool records(const VaultFile& vault) {
    Result<File> file = open_again(vault.path);
    if (!file.is_ok()) return true;
    bool zero = true, whole = false;
    const uint64_t gap = format::kRecordsOffset - format::kHeaderBytes;
    if (!each_piece(*file, format::kHeaderBytes, gap, &whole, [&](const uint8_t* p, uint64_t n) {
          zero = zero && std::all_of(p, p + n, [](uint8_t b) { return b == 0; });
        })) {
      return false;
    }
    if (whole && !zero) error(vault.path + ": bytes 4096 to 16383 are not zero");
    uint64_t record_bytes = 0;
    size_t moe_layer = 0;
    for (size_t layer = 0; layer < vault.model.layers.size(); ++layer) {
      if (!vault.model.layers[layer].ffn.is_moe()) continue;
      const auto& list = vault.records[moe_layer++];
      for (size_t e = 0; e < list.size(); ++e) {
        const std::string what = "record of layer " + std::to_string(layer) + ", expert " + std::to_string(e);
        if (!check_crc(*file, list[e].offset, list[e].length, list[e].crc32c, what)) return false;
        record_bytes += list[e].length;
      }
    }
    return count(vault.file_bytes - gap - record_bytes);  // header, table, manifest: checked by opening
  }

  bool trunk(const VaultFile& vault) {
    Result<File> file = open_again(vault.scout_path);
    if (!file.is_ok()) return true;
    uint64_t data = 0;
    for (const auto& [name, entry] : vault.trunk) {
      if (!check_crc(*file, entry.offset, entry.bytes, vault.model.tensors.at(name).crc32c, "tensor " + name))
        return false;
      data += entry.bytes;
    }
    return count(vault.scout_bytes - data);  // its header, checked by opening
  }

  bool tokenizer_folder(const std::string& folder, const std::vector<TokenizerFile>& files) {
    std::set<std::string> listed;
    for (const TokenizerFile& want : files) {
      listed.insert(want.name);
      if (!tokenizer_file(folder, want)) return false;
    }
    std::error_code failed;
    if (!fs::exists(folder, failed) && files.empty()) return true;
    fs::recursive_directory_iterator it(folder, failed);
    for (; !failed && it != fs::recursive_directory_iterator(); it.increment(failed)) {
      const std::string name = it->path().lexically_relative(folder).generic_string();
      const bool hidden = it->path().filename().native().starts_with(".");  // what file managers leave behind
      if (it->is_directory(failed) || hidden || listed.contains(name)) continue;
      error(it->path().string() + ": is not in the manifest; remove it");
    }
    if (failed) error(folder + ": cannot be listed: " + failed.message());
    return true;
  }

  bool tokenizer_file(const std::string& folder, const TokenizerFile& want) {
    Result<File> file = open_again(folder + "/" + want.name);
    if (!file.is_ok()) return true;
    const Result<uint64_t> size = file->size();
    if (!size.is_ok() || size.value() != want.bytes) {
      error(file->path() + ": is not " + std::to_string(want.bytes) + " bytes long");
      return true;
    }
    Sha256 sha;
    bool whole = false;
    const bool go_on =
        each_piece(*file, 0, want.bytes, &whole, [&](const uint8_t* p, uint64_t n) { sha.update(p, n); });
    if (whole && sha.hex() != want.sha256) error(file->path() + ": its SHA-256 is wrong");
    return go_on;
  }

  Result<File> open_again(const std::string& path) {
    Result<File> file = File::open_read(path);
    if (!file.is_ok()) {
      error(file.status().message());
      return file;
    }
#if defined(POSIX_FADV_SEQUENTIAL)
    (void)::posix_fadvise(file->fd(), 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
    return file;
  }

  VerifyReport* report_;
  const std::function<bool(uint64_t, uint64_t)>& progress_;
  std::vector<uint8_t> buffer_;
  uint64_t total_ = 0;
};

}  // namespace

VerifyReport verify_vault(const std::string& path, const std::function<bool(uint64_t, uint64_t)>& progress) {
  VerifyReport report;
  Verifier(&report, progress).run(path);
  return report;
}

}  // namespace smoe
