#include "util/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace smoe {
namespace {

constexpr size_t kMaxBytes = size_t{256} << 20;
constexpr size_t kMaxValues =
    size_t{4} << 20;  // a value costs about a hundred bytes: bounds what a small text can take
constexpr int kMaxDepth = 64;

void append_utf8(std::string* out, uint32_t c) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (c >> 6)));
    out->push_back(static_cast<char>(0x80 | (c & 63)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (c >> 12)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 63)));
    out->push_back(static_cast<char>(0x80 | (c & 63)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (c >> 18)));
    out->push_back(static_cast<char>(0x80 | ((c >> 12) & 63)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 63)));
    out->push_back(static_cast<char>(0x80 | (c & 63)));
  }
}

// Length of the well-formed UTF-8 sequence at the start of `s` (RFC 3629: no overlong forms, no surrogates), 0 if none.
size_t utf8_length(std::string_view s) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const auto tail = [&](size_t i, uint8_t low = 0x80, uint8_t high = 0xBF) {
    return i < s.size() && at(i) >= low && at(i) <= high;
  };
  const uint8_t c = at(0);
  if (c < 0x80) return 1;
  if (c >= 0xC2 && c <= 0xDF) return tail(1) ? 2 : 0;
  if (c >= 0xE0 && c <= 0xEF) {
    return tail(1, c == 0xE0 ? 0xA0 : 0x80, c == 0xED ? 0x9F : 0xBF) && tail(2) ? 3 : 0;
  }
  if (c >= 0xF0 && c <= 0xF4) {
    return tail(1, c == 0xF0 ? 0x90 : 0x80, c == 0xF4 ? 0x8F : 0xBF) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

template <class T>
bool to_integer(const std::string& text, T* out) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *out);
  return error == std::errc() && stop == end;  // a fraction or an exponent stops the scan early
}

}  // namespace

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}

  Result<Json> parse() {
    if (text_.size() > kMaxBytes) return Status(Code::corrupt, "JSON text is larger than 256 MiB");
    Json root;
    if (!value(&root, 0)) return error();
    skip_space();
    if (at_ != text_.size()) {
      fail("text after the value");
      return error();
    }
    return root;
  }

 private:
  bool fail(const char* what) {
    if (!what_) what_ = what;
    return false;
  }
  Status error() const {
    return Status(Code::corrupt, std::string("JSON: ") + what_ + " at byte " + std::to_string(at_));
  }

  bool more() const { return at_ < text_.size(); }
  char peek() const { return text_[at_]; }
  void skip_space() {
    while (more() && (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r')) ++at_;
  }
  bool take(char c) {
    if (!more() || peek() != c) return false;
    ++at_;
    return true;
  }
  bool word(std::string_view w) {
    if (text_.substr(at_, w.size()) != w) return fail("unknown word");
    at_ += w.size();
    return true;
  }

  bool value(Json* out, int depth) {
    if (depth > kMaxDepth) return fail("nested too deeply");
    if (++values_ > kMaxValues) return fail("too many values");
    skip_space();
    if (!more()) return fail("text ends early");
    switch (peek()) {
      case '{':
        return object(out, depth);
      case '[':
        return array(out, depth);
      case '"':
        out->type_ = Json::Type::string;
        return string(&out->text_);
      case 'n':
        return word("null");
      case 't':
        out->type_ = Json::Type::boolean;
        out->bool_ = true;
        return word("true");
      case 'f':
        out->type_ = Json::Type::boolean;
        return word("false");
      default:
        out->type_ = Json::Type::number;
        return number(&out->text_);
    }
  }

  bool array(Json* out, int depth) {
    out->type_ = Json::Type::array;
    ++at_;
    skip_space();
    if (take(']')) return true;
    do {
      out->items_.emplace_back();
      if (!value(&out->items_.back(), depth + 1)) return false;
      skip_space();
    } while (take(','));
    return take(']') || fail("expected , or ]");
  }

  bool object(Json* out, int depth) {
    out->type_ = Json::Type::object;
    ++at_;
    skip_space();
    if (take('}')) return true;
    do {
      skip_space();
      if (!more() || peek() != '"') return fail("expected a key");
      auto& member = out->members_.emplace_back();
      if (!string(&member.first)) return false;
      skip_space();
      if (!take(':')) return fail("expected :");
      if (!value(&member.second, depth + 1)) return false;
      skip_space();
    } while (take(','));
    if (!take('}')) return fail("expected , or }");
    return keys_differ(*out) || fail("duplicate key before this point");
  }

  static bool keys_differ(const Json& object) {
    std::vector<std::string_view> keys;
    keys.reserve(object.members_.size());
    for (const auto& member : object.members_) keys.push_back(member.first);
    std::sort(keys.begin(), keys.end());
    return std::adjacent_find(keys.begin(), keys.end()) == keys.end();
  }

  bool string(std::string* out) {
    ++at_;
    while (more()) {
      const auto c = static_cast<uint8_t>(peek());
      if (c == '"') {
        ++at_;
        return true;
      }
      if (c < 0x20) return fail("control character in a string");
      if (c == '\\') {
        if (!escape(out)) return false;
        continue;
      }
      const size_t n = utf8_length(text_.substr(at_, 4));
      if (n == 0) return fail("malformed UTF-8");
      out->append(text_.substr(at_, n));
      at_ += n;
    }
    return fail("string without an end");
  }

  bool escape(std::string* out) {
    ++at_;
    if (!more()) return fail("string without an end");
    const char c = text_[at_++];
    switch (c) {
      case '"':
      case '\\':
      case '/':
        out->push_back(c);
        return true;
      case 'b':
        out->push_back('\b');
        return true;
      case 'f':
        out->push_back('\f');
        return true;
      case 'n':
        out->push_back('\n');
        return true;
      case 'r':
        out->push_back('\r');
        return true;
      case 't':
        out->push_back('\t');
        return true;
      case 'u':
        return unicode_escape(out);
      default:
        return fail("unknown escape");
    }
  }

  bool unicode_escape(std::string* out) {
    uint32_t c = 0;
    if (!hex4(&c)) return false;
    if (c >= 0xD800 && c <= 0xDFFF) {  // a pair of surrogates, high first, is one code point
      uint32_t low = 0;
      if (c > 0xDBFF || !take('\\') || !take('u') || !hex4(&low) || low < 0xDC00 || low > 0xDFFF) {
        return fail("surrogate without its pair");
      }
      c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(out, c);
    return true;
  }

  bool hex4(uint32_t* out) {
    if (text_.size() - at_ < 4) return fail("cut \\u escape");
    const char* end = text_.data() + at_ + 4;
    const auto [stop, error] = std::from_chars(text_.data() + at_, end, *out, 16);
    if (error != std::errc() || stop != end) return fail("bad \\u escape");
    at_ += 4;
    return true;
  }

  bool digits() {
    if (!more() || !is_digit(peek())) return fail("malformed number or unknown word");
    while (more() && is_digit(peek())) ++at_;
    return true;
  }

  bool number(std::string* out) {
    const size_t start = at_;
    take('-');
    if (!take('0') && !digits()) return false;
    if (more() && is_digit(peek())) return fail("number with a leading zero");
    if (take('.') && !digits()) return false;
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      if (!digits()) return false;
    }
    out->assign(text_.substr(start, at_ - start));
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  size_t values_ = 0;
  const char* what_ = nullptr;
};

Result<Json> Json::parse(std::string_view text) { return JsonParser(text).parse(); }

bool Json::to_u64(uint64_t* out) const { return is_number() && to_integer(text_, out); }

bool Json::to_i64(int64_t* out) const { return is_number() && to_integer(text_, out); }

bool Json::to_double(double* out) const {
  if (!is_number()) return false;
  const char* end = text_.data() + text_.size();
  const auto [stop, error] = std::from_chars(text_.data(), end, *out);
  return error == std::errc() && stop == end && std::isfinite(*out);  // out of range is an error, also towards zero
}

const Json* Json::find(std::string_view key) const {
  for (const auto& member : members_) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

std::string json_quote(std::string_view text) {
  static const char* hex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          out += "\\u00";
          out += hex[static_cast<uint8_t>(c) >> 4];
          out += hex[c & 15];
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

}  // namespace smoe
