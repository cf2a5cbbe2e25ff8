#include "util/sizes.h"

#include <cstdio>

namespace smoe {

std::string show_bytes(uint64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double size = static_cast<double>(bytes) / 1024;
  const char* unit = "KB";
  for (const char* larger : {"MB", "GB", "TB"}) {
    if (size < 1024) break;
    size /= 1024;
    unit = larger;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", size, unit);
  return text;
}

}  // namespace smoe
