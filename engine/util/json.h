// A small strict JSON reader (RFC 8259) and a string quoter: manifests, safetensors headers, INFO. Depth and size
// bounded, never throws, never recurses without a bound. Numbers keep their text so that 64-bit integers stay exact.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smoe/status.h"

namespace smoe {

class Json {
 public:
  enum class Type { null, boolean, number, string, array, object };
  static Result<Json> parse(std::string_view text);

  Type type() const { return type_; }
  bool is_object() const { return type_ == Type::object; }
  bool is_array() const { return type_ == Type::array; }
  bool is_string() const { return type_ == Type::string; }
  bool is_number() const { return type_ == Type::number; }
  bool is_bool() const { return type_ == Type::boolean; }

  bool boolean() const { return bool_; }
  const std::string& string() const { return text_; }
  bool to_u64(uint64_t* out) const;  // false unless a non-negative integer that fits
  bool to_i64(int64_t* out) const;
  bool to_double(double* out) const;  // false unless a finite number
  const std::vector<Json>& items() const { return items_; }
  const std::vector<std::pair<std::string, Json>>& members() const { return members_; }
  const Json* find(std::string_view key) const;  // nullptr if absent or not an object; duplicates are a parse error

 private:
  friend class JsonParser;
  Type type_ = Type::null;
  bool bool_ = false;
  std::string text_;
  std::vector<Json> items_;
  std::vector<std::pair<std::string, Json>> members_;
};

std::string json_quote(std::string_view text);

}  // namespace smoe
