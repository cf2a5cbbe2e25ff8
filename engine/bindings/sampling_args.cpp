#include "bindings/sampling_args.h"

#include <pybind11/stl.h>

#include <functional>
#include <map>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace smoe {

Request request_from(const py::kwargs& params) {
  Request r;
  Sampling& s = r.sampling;
  s.temperature = 0, s.top_p = 1, s.top_k = 0, s.repetition_penalty = 1;
  const std::map<std::string, std::function<void(py::handle)>> setters = {
      {"temperature", [&](py::handle v) { s.temperature = v.cast<float>(); }},
      {"top_p", [&](py::handle v) { s.top_p = v.cast<float>(); }},
      {"top_k", [&](py::handle v) { s.top_k = v.cast<uint32_t>(); }},
      {"min_p", [&](py::handle v) { s.min_p = v.cast<float>(); }},
      {"repetition_penalty", [&](py::handle v) { s.repetition_penalty = v.cast<float>(); }},
      {"frequency_penalty", [&](py::handle v) { s.frequency_penalty = v.cast<float>(); }},
      {"presence_penalty", [&](py::handle v) { s.presence_penalty = v.cast<float>(); }},
      {"seed", [&](py::handle v) { s.seed = v.cast<uint64_t>(); }},
      {"stop_ids", [&](py::handle v) { r.stop_ids = v.cast<std::vector<int32_t>>(); }},
      {"bias", [&](py::handle v) { r.bias = v.cast<std::vector<std::pair<int32_t, float>>>(); }},
      {"session", [&](py::handle v) { r.session = v.cast<std::string>(); }},
      {"mask", [&](py::handle v) { r.mask = v.cast<bool>(); }},
      {"slide", [&](py::handle v) { r.slide = v.cast<bool>(); }},
      {"logprobs", [&](py::handle v) { r.report_logprobs = true, r.logprobs = v.cast<uint32_t>(); }},
  };
  for (const auto& [key, value] : params) {
    const auto name = key.cast<std::string>();
    const auto setter = setters.find(name);
    if (setter == setters.end()) raise({Code::usage, "unknown sampling argument " + name});
    setter->second(value);
  }
  return r;
}

}  // namespace smoe
