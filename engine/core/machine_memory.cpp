// How much memory this process may use: the machine's, or what a control group leaves of it.
#include <algorithm>
#include <sstream>

#include "smoe/plan.h"
#include "util/cgroup.h"

namespace smoe {
namespace {

// A line of /proc/meminfo, in bytes; false if it is not there.
bool meminfo(const std::string& text, const std::string& name, uint64_t* bytes) {
  size_t at = text.compare(0, name.size(), name) == 0 ? 0 : text.find("\n" + name);
  if (at == std::string::npos) return false;
  at = text.find(':', at);
  const size_t unit = text.find(" kB", at);
  if (at == std::string::npos || unit == std::string::npos || !parse_bytes(text.substr(at + 1, unit - at - 1), bytes)) {
    return false;
  }
  *bytes *= 1024;
  return true;
}

// A limit in `path` below what is known so far takes its place. "max" and version 1's huge number for "none" never do.
void apply_limit(const std::string& root, const std::string& path, MachineMemory* machine) {
  std::string text;
  uint64_t limit = 0;
  if (!read_small_file(path, &text) || !parse_bytes(text, &limit) || limit >= machine->usable_ram_bytes) return;
  machine->usable_ram_bytes = limit;
  machine->limited_by = path.substr(root.size());
}

// A named number in a file of lines "name number"; 0 if it is not there.
uint64_t stat_line(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  std::string word;
  for (uint64_t value = 0; lines >> word >> value;) {
    if (word == name) return value;
  }
  return 0;
}

// The files of one version of control groups that say what a group holds.
struct GroupFiles {
  const char *limit, *used, *inactive_file, *active_file;
};
constexpr GroupFiles kV1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file",
                         "total_active_file"};
constexpr GroupFiles kV2{"/memory.max", "/memory.current", "inactive_file", "active_file"};
constexpr GroupFiles kV2High{"/memory.high", "/memory.current", "inactive_file", "active_file"};

void apply_group(const std::string& folder, const GroupFiles& files, uint64_t physical, FreeMemory* free) {
  std::string text;
  uint64_t limit = 0, used = 0;
  if (!read_small_file(folder + files.limit, &text) || !parse_bytes(text, &limit) || limit >= physical) return;
  if (!read_small_file(folder + files.used, &text) || !parse_bytes(text, &used)) return;
  uint64_t cached = 0;
  if (read_small_file(folder + "/memory.stat", &text)) {
    cached = stat_line(text, files.inactive_file) + stat_line(text, files.active_file);
  }
  used -= std::min(used, cached);
  const uint64_t left = std::max<uint64_t>(1, limit - std::min(limit, used));  // 0 would mean unknown
  if (left < free->bytes) *free = {left, limit, used};
}

}  // namespace

FreeMemory read_free_memory(const std::string& root) {
  FreeMemory free;
  std::string text;
  uint64_t physical = 0;
  if (!read_small_file(root + "/proc/meminfo", &text) || !meminfo(text, "MemTotal", &physical) ||
      !meminfo(text, "MemAvailable", &free.bytes)) {
    return {};
  }
  const CgroupFolders folders = cgroup_folders(root, "memory");
  for (const std::string& folder : folders.v2) {
    apply_group(folder, kV2, physical, &free);
    apply_group(folder, kV2High, physical, &free);
  }
  for (const std::string& folder : folders.v1) apply_group(folder, kV1, physical, &free);
  return free;
}

Result<MachineMemory> read_machine_memory(const std::string& root) {
  MachineMemory machine;
  std::string text;
  if (!read_small_file(root + "/proc/meminfo", &text) || !meminfo(text, "MemTotal", &machine.physical_ram_bytes)) {
    return Status(Code::failed, "cannot read the size of memory from " + root + "/proc/meminfo");
  }
  (void)meminfo(text, "MemAvailable", &machine.available_bytes);  // older kernels have none: no warning then
  machine.usable_ram_bytes = machine.physical_ram_bytes;
  machine.limited_by = "physical RAM";
  const CgroupFolders folders = cgroup_folders(root, "memory");
  for (const std::string& folder : folders.v2) {
    apply_limit(root, folder + "/memory.max", &machine);
    apply_limit(root, folder + "/memory.high", &machine);
  }
  for (const std::string& folder : folders.v1) apply_limit(root, folder + "/memory.limit_in_bytes", &machine);
  return machine;
}

}  // namespace smoe
