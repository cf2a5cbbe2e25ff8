// Status and Result: how every failure travels through the engine. Nothing throws across a public boundary, nothing
// prints, nothing exits. A message says what failed and where; a hint says what to do about it.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace smoe {

enum class Code {
  ok = 0,
  failed,     // something went wrong that is nobody's fault in particular      (exit 1)
  usage,      // the caller asked for something that has no meaning             (exit 2)
  resources,  // not enough memory or disk for what was asked                   (exit 3)
  corrupt,    // a file is damaged, cut short or of another make                (exit 4)
  io,         // the operating system refused a read or a write                 (exit 1)
  cancelled,  // the caller asked for the work to stop                          (exit 130)
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, std::string hint = {})
      : code_(code), message_(std::move(message)), hint_(std::move(hint)) {}

  static Status ok() { return {}; }
  bool is_ok() const { return code_ == Code::ok; }
  explicit operator bool() const { return is_ok(); }

  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& hint() const { return hint_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
  std::string hint_;
};

// A value or the Status that says why there is none. Reading the value of a failed Result is a programming error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT
  bool is_ok() const { return value_.has_value(); }
  explicit operator bool() const { return is_ok(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  T& operator*() { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace smoe

// Early return on failure: SMOE_TRY(status_expression); SMOE_ASSIGN(auto x, result_expression).
#define SMOE_TRY(expr)                    \
  do {                                    \
    ::smoe::Status smoe_s_ = (expr);      \
    if (!smoe_s_.is_ok()) return smoe_s_; \
  } while (0)
#define SMOE_CONCAT_(a, b) a##b
#define SMOE_CONCAT(a, b) SMOE_CONCAT_(a, b)
#define SMOE_ASSIGN(decl, expr) SMOE_ASSIGN_(SMOE_CONCAT(smoe_r_, __LINE__), decl, expr)
#define SMOE_ASSIGN_(tmp, decl, expr)    \
  auto tmp = (expr);                     \
  if (!tmp.is_ok()) return tmp.status(); \
  decl = std::move(tmp).value()
