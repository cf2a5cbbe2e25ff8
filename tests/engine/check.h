// A test harness in one header: TEST(name) { CHECK(cond); CHECK_EQ(a, b); }. `smoe-tests [filter]` runs those whose
// name contains the filter, prints each failure with file and line, ends with "N passed, N failed" and exits 1 on any
// failure.
#pragma once

#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  std::string name;
  std::function<void()> body;
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline int& failures() {
  static int count = 0;
  return count;
}
struct Register {
  Register(const char* name, std::function<void()> body) { tests().push_back({name, std::move(body)}); }
};
inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  std::cerr << file << ":" << line << ": " << what << "\n";
}

}  // namespace check

#define TEST(name)                                                  \
  static void test_##name();                                        \
  static const check::Register register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(cond)                                                   \
  do {                                                                \
    if (!(cond)) check::fail(__FILE__, __LINE__, "CHECK(" #cond ")"); \
  } while (0)
#define CHECK_EQ(a, b)                                                   \
  do {                                                                   \
    const auto va_ = (a); /* a copy: (a) may be a part of a temporary */ \
    const auto vb_ = (b);                                                \
    if (!(va_ == vb_)) {                                                 \
      std::ostringstream os_;                                            \
      os_ << "CHECK_EQ(" #a ", " #b "): " << va_ << " != " << vb_;       \
      check::fail(__FILE__, __LINE__, os_.str());                        \
    }                                                                    \
  } while (0)
#define REQUIRE(cond)                                        \
  do {                                                       \
    if (!(cond)) {                                           \
      check::fail(__FILE__, __LINE__, "REQUIRE(" #cond ")"); \
      return;                                                \
    }                                                        \
  } while (0)
