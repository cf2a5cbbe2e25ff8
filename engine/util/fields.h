// Strict reading of a JSON object's fields: each getter names the field in its error, and unknown() refuses what nobody
// read.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "smoe/status.h"
#include "util/json.h"

namespace smoe {

class Fields {
 public:
  // `where` is the object's place in the document ("arch.layers[3].ffn"). Not an object: Code::corrupt.
  static Result<Fields> of(const Json& json, std::string where);
  Result<Fields> object(std::string_view key) const;
  Result<const Json*> array(std::string_view key) const;
  Result<const Json*> any(std::string_view key) const;

  Status u64(std::string_view key, uint64_t low, uint64_t high, uint64_t* out) const;
  Status u32(std::string_view key, uint32_t low, uint32_t high, uint32_t* out) const;
  Status f32(std::string_view key, float low, float high, float* out) const;
  Status boolean(std::string_view key, bool* out) const;
  Status string(std::string_view key, std::string* out) const;
  // Refuses keys other than these.
  Status only(std::initializer_list<std::string_view> keys) const;

  const Json& json() const { return *json_; }
  bool has(std::string_view key) const { return json_->find(key) != nullptr; }
  std::string name(std::string_view key) const;
  Status bad(std::string_view key, const std::string& what) const;

 private:
  Fields(const Json* json, std::string where) : json_(json), where_(std::move(where)) {}
  const Json* json_;
  std::string where_;
};

// A float32 written in decimal. False unless finite and within [low, high].
bool json_f32(const Json& json, float low, float high, float* out);

}  // namespace smoe
