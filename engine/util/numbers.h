// Text <-> numbers, whole words only, never a guess: no white space, no sign before an unsigned, no NaN, no infinity,
// no locale, no allocation.
#pragma once

#include <cfloat>
#include <charconv>
#include <cmath>
#include <concepts>
#include <string>
#include <string_view>
#include <system_error>

namespace smoe {

template <std::integral T>
bool parse_number(std::string_view text, T* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

// Read as a double and narrowed, so that a tiny value becomes 0 instead of an error. False unless finite as a float.
inline bool parse_number(std::string_view text, float* out) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(std::fabs(value) <= FLT_MAX)) return false;
  *out = static_cast<float>(value);
  return true;
}

template <class T>
void append_number(std::string* out, T value) {  // the shortest text that reads back as the same number
  char buffer[32];
  out->append(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
}

inline void append_fixed(std::string* out, double value, int digits) {
  char buffer[400];  // the largest double has 309 digits
  out->append(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed, digits).ptr);
}

}  // namespace smoe
