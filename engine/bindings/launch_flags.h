// Python keyword arguments as the launch flags of smoe-engine, so that one parser reads both.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace smoe {

// {"ctx": 512, "verify_reads": True, "exempt": [1, 2], "read_mode": "direct"}
// -> --ctx=512 --verify-reads --exempt=1,2 --direct. None and False are left out.
std::vector<std::string> launch_flags(const pybind11::kwargs& options);

}  // namespace smoe
