#include "bindings/launch_flags.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>

namespace py = pybind11;

namespace smoe {
namespace {

std::string joined(const std::vector<int32_t>& ids) {
  std::string text;
  for (int32_t id : ids) {
    if (!text.empty()) text += ',';
    text += std::to_string(id);
  }
  return text;
}

}  // namespace

std::vector<std::string> launch_flags(const py::kwargs& options) {
  std::vector<std::string> flags;
  for (const auto& [key, value] : options) {
    auto name = key.cast<std::string>();
    const bool is_bool = py::isinstance<py::bool_>(value);
    if (value.is_none() || (is_bool && !value.cast<bool>())) continue;
    if (name == "read_mode") {  // a choice here, two switches there
      name = py::str(value).cast<std::string>();
      if (name == "auto") continue;
    }
    if (name == "budget_bytes") name = "budget";
    std::replace(name.begin(), name.end(), '_', '-');
    const bool is_switch = is_bool || name == "direct" || name == "buffered";
    const bool is_list = py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value);
    const std::string text = is_list ? joined(value.cast<std::vector<int32_t>>()) : py::str(value).cast<std::string>();
    flags.push_back("--" + name + (is_switch ? "" : "=" + text));
  }
  return flags;
}

}  // namespace smoe
