#include <algorithm>
#include <string>
#include <vector>

#include "check.h"

int main(int argc, char** argv) {
  const std::vector<std::string> filters(argv + 1, argv + argc);  // a test runs if any of them is in its name
  const auto chosen = [&](const std::string& name) {
    return filters.empty() || std::any_of(filters.begin(), filters.end(), [&](const std::string& filter) {
             return name.find(filter) != std::string::npos;
           });
  };
  int passed = 0, failed = 0;
  for (const auto& test : check::tests()) {
    if (!chosen(test.name)) continue;
    const int before = check::failures();
    test.body();
    if (check::failures() == before) {
      ++passed;
    } else {
      ++failed;
      std::cerr << "FAILED " << test.name << "\n";
    }
  }
  std::cout << passed << " passed, " << failed << " failed\n";
  return failed || passed == 0 ? 1 : 0;
}
