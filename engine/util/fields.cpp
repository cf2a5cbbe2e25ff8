#include "util/fields.h"

#include <algorithm>
#include <sstream>

namespace smoe {

Result<Fields> Fields::of(const Json& json, std::string where) {
  if (!json.is_object()) return Status(Code::corrupt, where + " is not an object");
  return Fields(&json, std::move(where));
}

std::string Fields::name(std::string_view key) const {
  return where_.empty() ? std::string(key) : where_ + "." + std::string(key);
}

Status Fields::bad(std::string_view key, const std::string& what) const {
  return Status(Code::corrupt, name(key) + " " + what);
}

Result<const Json*> Fields::any(std::string_view key) const {
  const Json* value = json_->find(key);
  if (value == nullptr) return bad(key, "is missing");
  return value;
}

Result<Fields> Fields::object(std::string_view key) const {
  SMOE_ASSIGN(const Json* value, any(key));
  return of(*value, name(key));
}

Result<const Json*> Fields::array(std::string_view key) const {
  SMOE_ASSIGN(const Json* value, any(key));
  if (!value->is_array()) return bad(key, "is not an array");
  return value;
}

Status Fields::u64(std::string_view key, uint64_t low, uint64_t high, uint64_t* out) const {
  SMOE_ASSIGN(const Json* value, any(key));
  if (value->to_u64(out) && *out >= low && *out <= high) return Status::ok();
  return bad(key, "is not a whole number from " + std::to_string(low) + " to " + std::to_string(high));
}

Status Fields::u32(std::string_view key, uint32_t low, uint32_t high, uint32_t* out) const {
  uint64_t wide = 0;
  SMOE_TRY(u64(key, low, high, &wide));
  *out = static_cast<uint32_t>(wide);
  return Status::ok();
}

Status Fields::f32(std::string_view key, float low, float high, float* out) const {
  SMOE_ASSIGN(const Json* value, any(key));
  if (json_f32(*value, low, high, out)) return Status::ok();
  std::ostringstream range;
  range << "is not a number from " << low << " to " << high;
  return bad(key, range.str());
}

Status Fields::boolean(std::string_view key, bool* out) const {
  SMOE_ASSIGN(const Json* value, any(key));
  if (!value->is_bool()) return bad(key, "is not true or false");
  *out = value->boolean();
  return Status::ok();
}

Status Fields::string(std::string_view key, std::string* out) const {
  SMOE_ASSIGN(const Json* value, any(key));
  if (!value->is_string()) return bad(key, "is not a string");
  *out = value->string();
  return Status::ok();
}

Status Fields::only(std::initializer_list<std::string_view> keys) const {
  for (const auto& member : json_->members()) {
    if (std::find(keys.begin(), keys.end(), member.first) == keys.end())
      return bad(member.first, "is an unknown field");
  }
  return Status::ok();
}

bool json_f32(const Json& json, float low, float high, float* out) {
  double wide = 0;
  if (!json.to_double(&wide) || wide < low || wide > high) return false;
  *out = static_cast<float>(wide);
  return true;
}

}  // namespace smoe
