// Where this process stands in the control group tree, version 1, 2 or both at once, inside a container or out of one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace smoe {

struct CgroupFolders {
  // The process's own group first, then each parent up to the root of what is mounted. Empty where there is none.
  std::vector<std::string> v1, v2;
};

// `root` is put before every path ("" = the real system; tests pass a fake tree with proc/self/cgroup and
// proc/self/mountinfo in it). `controller` is a version 1 name: "memory", "cpu".
CgroupFolders cgroup_folders(const std::string& root, const std::string& controller);

// The whole of a small file; false if it cannot be read.
bool read_small_file(const std::string& path, std::string* text);

// A decimal number; false for "max", for anything else that is no number and for one that does not fit.
bool parse_bytes(const std::string& text, uint64_t* out);

}  // namespace smoe
