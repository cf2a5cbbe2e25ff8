#include "util/cgroup.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <sstream>

namespace smoe {
namespace {

struct Mount {
  std::string root;   // the group that the mount shows at its top
  std::string point;  // where
  bool v2 = false;
};

bool is_folder(const std::string& path) {
  struct stat info{};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool lists(const std::string& comma_separated, const std::string& word) {
  std::istringstream stream(comma_separated);
  for (std::string item; std::getline(stream, item, ',');) {
    if (item == word) return true;
  }
  return false;
}

// mountinfo writes space, tab, newline and backslash as three octal digits.
std::string unescape(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int value = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 4, value, 8).ptr == text.data() + i + 4) {
      out.push_back(static_cast<char>(value));
      i += 3;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

// A line: id parent major:minor ROOT POINT options [optional ...] - TYPE source SUPER_OPTIONS
std::vector<Mount> cgroup_mounts(const std::string& root, const std::string& controller) {
  std::vector<Mount> mounts;
  std::string text;
  if (!read_small_file(root + "/proc/self/mountinfo", &text)) return mounts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line), right(line.substr(dash + 3));
    std::string skip, type, source, options;
    Mount mount;
    left >> skip >> skip >> skip >> mount.root >> mount.point;
    right >> type >> source >> options;
    mount.v2 = type == "cgroup2";
    if (!mount.v2 && !(type == "cgroup" && lists(options, controller))) continue;
    mount.root = unescape(mount.root);
    mount.point = unescape(mount.point);
    mounts.push_back(mount);
  }
  return mounts;
}

// The path of this process's group, as /proc/self/cgroup has it; false if it is in none.
bool own_group(const std::string& root, const std::string& controller, bool v2, std::string* path) {
  std::string text;
  if (!read_small_file(root + "/proc/self/cgroup", &text)) return false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (v2 ? controllers.empty() && line.compare(0, first, "0") == 0 : lists(controllers, controller)) {
      *path = line.substr(second + 1);
      return true;
    }
  }
  return false;
}

// The folder chain of `group` below `mount`. Inside a container the path may be one of the host's that the mount does
// not show: then the nearest part that exists is taken, at worst the mount point, which is the container's own group.
std::vector<std::string> chain(const std::string& root, const Mount& mount, std::string group) {
  const std::string top = root + mount.point;
  if (mount.root != "/" && (group == mount.root || group.compare(0, mount.root.size() + 1, mount.root + "/") == 0)) {
    group.erase(0, mount.root.size());
  }
  std::vector<std::string> folders;
  while (!group.empty() && group != "/") {
    if (group.find("/..") == std::string::npos && is_folder(top + group)) folders.push_back(top + group);
    const size_t slash = group.rfind('/');
    group.erase(slash == std::string::npos ? 0 : slash);
  }
  if (is_folder(top)) folders.push_back(top);
  return folders;
}

}  // namespace

bool read_small_file(const std::string& path, std::string* text) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  text->clear();
  char block[4096];
  ssize_t got = 0;
  while (text->size() < (4u << 20) && (got = read(fd, block, sizeof block)) > 0) {
    text->append(block, static_cast<size_t>(got));
  }
  close(fd);
  return got >= 0;
}

bool parse_bytes(const std::string& text, uint64_t* out) {
  size_t begin = text.find_first_not_of(" \t\n"), end = text.find_last_not_of(" \t\n");
  if (begin == std::string::npos) return false;
  const char* first = text.data() + begin;
  const char* last = text.data() + end + 1;
  const auto [stop, error] = std::from_chars(first, last, *out);
  return error == std::errc{} && stop == last;
}

CgroupFolders cgroup_folders(const std::string& root, const std::string& controller) {
  CgroupFolders folders;
  for (const Mount& mount : cgroup_mounts(root, controller)) {
    std::vector<std::string>& list = mount.v2 ? folders.v2 : folders.v1;
    std::string group;
    if (list.empty() && own_group(root, controller, mount.v2, &group)) list = chain(root, mount, group);
  }
  return folders;
}

}  // namespace smoe
