#include "experts/trace.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "util/json.h"

namespace smoe {
namespace {

constexpr char kMagic[8] = {'S', 'M', 'O', 'E', 'T', 'R', 'C', 'E'};
constexpr size_t kBuffer = 64 << 10;
constexpr uint32_t kMaxLayers = 4096, kMaxExperts = 65536;

std::string list(const std::vector<uint32_t>& numbers) {
  std::string text = "[";
  for (uint32_t number : numbers) text += (text.size() > 1 ? "," : "") + std::to_string(number);
  return text + "]";
}

bool read_list(const Json& object, const char* name, uint32_t most, std::vector<uint32_t>* out) {
  const Json* items = object.find(name);
  if (items == nullptr || !items->is_array() || items->items().size() > kMaxLayers) return false;
  for (const Json& item : items->items()) {
    uint64_t number = 0;
    if (!item.to_u64(&number) || number == 0 || number > most) return false;
    out->push_back(static_cast<uint32_t>(number));
  }
  return true;
}

Status no_file(const std::string& what, const std::string& path) {
  return {Code::io, "cannot " + what + " the trace " + path + ": " + std::strerror(errno)};
}

}  // namespace

// --- writing ---

Result<std::unique_ptr<TraceWriter>> TraceWriter::open(const std::string& path, const TraceHeader& header) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return no_file("write", path);
  std::unique_ptr<TraceWriter> writer(new TraceWriter(file, path));
  const std::string json = "{\"version\":1,\"model\":" + json_quote(header.model) +
                           ",\"experts\":" + list(header.experts) + ",\"top_k\":" + list(header.top_k) +
                           ",\"slots\":" + std::to_string(header.slots) + ",\"policy\":" + json_quote(header.policy) +
                           "}";
  writer->buffer_.reserve(2 * kBuffer);
  writer->buffer_.append(kMagic, sizeof kMagic);
  for (int shift = 0; shift < 32; shift += 8) writer->buffer_ += static_cast<char>(json.size() >> shift & 0xff);
  writer->buffer_ += json;
  SMOE_TRY(writer->flush());
  return writer;
}

TraceWriter::~TraceWriter() {
  (void)flush();
  std::fclose(file_);
}

void TraceWriter::put(uint64_t number) {
  for (; number >= 128; number >>= 7) buffer_ += static_cast<char>(number | 128);
  buffer_ += static_cast<char>(number);
}

void TraceWriter::fetch(uint32_t layer, const uint32_t* experts, const uint32_t* uses, size_t count, uint32_t tokens) {
  put(static_cast<uint64_t>(TraceEvent::Kind::fetch));
  put(layer);
  put(tokens);
  put(count);
  for (size_t i = 0; i < count; ++i) {
    put(experts[i]);
    if (tokens > 1) put(uses != nullptr ? uses[i] : 1);
  }
  write_if_full();
}

void TraceWriter::insert(uint32_t record, bool may_evict) {
  put(static_cast<uint64_t>(TraceEvent::Kind::insert));
  put(record);
  put(may_evict ? 1 : 0);
}

void TraceWriter::drop(uint32_t record) {
  put(static_cast<uint64_t>(TraceEvent::Kind::drop));
  put(record);
}

void TraceWriter::resize(uint32_t slots) {
  put(static_cast<uint64_t>(TraceEvent::Kind::resize));
  put(slots);
}

void TraceWriter::seed(const std::vector<float>& counts) {
  put(static_cast<uint64_t>(TraceEvent::Kind::seed));
  for (float count : counts) {
    uint32_t bits = 0;
    std::memcpy(&bits, &count, sizeof bits);
    for (int shift = 0; shift < 32; shift += 8) buffer_ += static_cast<char>(bits >> shift & 0xff);
  }
  write_if_full();
}

void TraceWriter::write_if_full() {
  if (buffer_.size() >= kBuffer) (void)flush();
}

Status TraceWriter::flush() {
  if (!failed_ &&
      (std::fwrite(buffer_.data(), 1, buffer_.size(), file_) != buffer_.size() || std::fflush(file_) != 0)) {
    failed_ = true;
  }
  buffer_.clear();
  return failed_ ? no_file("write", path_) : Status::ok();
}

// --- reading ---

Result<TraceReader> TraceReader::open(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return no_file("read", path);
  std::string bytes;
  char block[kBuffer];
  for (size_t got = 0; (got = std::fread(block, 1, sizeof block, file)) > 0;) bytes.append(block, got);
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed) return no_file("read", path);
  TraceReader reader(path, std::move(bytes));
  SMOE_TRY(reader.read_header());
  return reader;
}

Status TraceReader::damaged(const char* what) const {
  return {Code::corrupt, "the trace " + path_ + " is damaged at byte " + std::to_string(at_) + ": " + what,
          "record it again with --trace"};
}

Status TraceReader::read_header() {
  const size_t fixed = sizeof kMagic + 4;
  if (bytes_.size() < fixed || std::memcmp(bytes_.data(), kMagic, sizeof kMagic) != 0) {
    return {Code::corrupt, path_ + " is no routing trace", "one is made with --trace FILE"};
  }
  uint32_t length = 0;
  for (int i = 0; i < 4; ++i) length |= uint32_t{static_cast<uint8_t>(bytes_[sizeof kMagic + i])} << (8 * i);
  if (length > bytes_.size() - fixed) return damaged("the header is cut short");
  SMOE_ASSIGN(const Json json, Json::parse(std::string_view(bytes_).substr(fixed, length)));
  uint64_t version = 0, slots = 0;
  const Json *v = json.find("version"), *s = json.find("slots"), *p = json.find("policy"), *m = json.find("model");
  if (v == nullptr || !v->to_u64(&version) || version != 1) return damaged("its version is not 1");
  if (s == nullptr || !s->to_u64(&slots) || slots > UINT32_MAX || p == nullptr || !p->is_string() || m == nullptr ||
      !m->is_string() || !read_list(json, "experts", kMaxExperts, &header_.experts) ||
      !read_list(json, "top_k", kMaxExperts, &header_.top_k)) {
    return damaged("the header lacks a field");
  }
  header_.slots = static_cast<uint32_t>(slots);
  header_.policy = p->string();
  header_.model = m->string();
  table_ = ExpertTable(header_.experts);
  start_ = at_ = fixed + length;
  return Status::ok();
}

bool TraceReader::take(uint64_t* number) {
  *number = 0;
  for (int shift = 0; shift < 64 && at_ < bytes_.size(); shift += 7) {
    const auto byte = static_cast<uint8_t>(bytes_[at_++]);
    *number |= uint64_t{byte & 127u} << shift;
    if (byte < 128) return true;
  }
  return false;
}

bool TraceReader::take(uint32_t* number, uint32_t below, bool* valid) {
  uint64_t value = 0;
  if (!take(&value)) return false;
  if (value >= below) *valid = false;
  *number = static_cast<uint32_t>(value);
  return *valid;
}

Result<bool> TraceReader::next(TraceEvent* e) {
  uint64_t kind = 0, count = 0;
  if (!take(&kind)) return false;
  bool valid = true, whole = true;
  e->kind = static_cast<TraceEvent::Kind>(kind);
  e->experts.clear();
  e->uses.clear();
  switch (e->kind) {
    case TraceEvent::Kind::fetch: {
      whole = take(&e->layer, table_.layers(), &valid) && take(&e->tokens, UINT32_MAX, &valid) && take(&count);
      const uint32_t experts = valid && whole ? header_.experts[e->layer] : 0;
      if (whole && count > experts) valid = false;
      seen_.assign(experts, false);
      for (uint64_t i = 0; i < count && whole && valid; ++i) {
        whole = take(&e->experts.emplace_back(), experts, &valid) &&
                (e->tokens <= 1 || take(&e->uses.emplace_back(), UINT32_MAX, &valid));
        if (!whole || !valid) break;
        if (seen_[e->experts.back()]) valid = false;  // an expert twice in one fetch
        seen_[e->experts.back()] = true;
      }
      break;
    }
    case TraceEvent::Kind::insert: {
      uint32_t flag = 0;
      whole = take(&e->record, table_.records(), &valid) && take(&flag, 2, &valid);
      e->may_evict = flag != 0;
      break;
    }
    case TraceEvent::Kind::drop:
      whole = take(&e->record, table_.records(), &valid);
      break;
    case TraceEvent::Kind::resize:
      whole = take(&e->slots, UINT32_MAX, &valid);
      if (whole && e->slots == 0) valid = false;
      break;
    case TraceEvent::Kind::seed: {
      const size_t bytes = size_t{4} * table_.records();
      if (!(whole = bytes_.size() - at_ >= bytes)) break;
      e->counts.resize(table_.records());
      for (uint32_t r = 0; r < table_.records(); ++r, at_ += 4) {
        uint32_t bits = 0;
        for (int i = 0; i < 4; ++i) bits |= uint32_t{static_cast<uint8_t>(bytes_[at_ + i])} << (8 * i);
        std::memcpy(&e->counts[r], &bits, sizeof bits);
      }
      break;
    }
    default:
      return damaged("an event of an unknown kind");
  }
  if (!valid) return damaged("a number is out of range");
  return whole;
}

}  // namespace smoe
