// The sampler alone, for the comparison with the reference implementation.
#include "core/sampler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/sampling_args.h"

namespace py = pybind11;

namespace smoe {
namespace {

using Logits = py::array_t<float, py::array::c_style | py::array::forcecast>;

const uint8_t* mask_bits(const std::optional<std::string>& mask, uint32_t vocab) {
  if (!mask) return nullptr;
  if (mask->size() != (vocab + 7) / 8) raise({Code::usage, "the mask needs ceil(vocab / 8) bytes"});
  return reinterpret_cast<const uint8_t*>(mask->data());
}

py::array_t<double> sample_probs(const Logits& logits, const std::vector<int32_t>& history,
                                 const std::optional<std::string>& mask, const std::vector<int32_t>& exempt,
                                 const py::kwargs& params) {
  const auto vocab = static_cast<uint32_t>(logits.size());
  Sampler sampler(vocab);
  check(sampler.begin(request_from(params), exempt));
  py::array_t<double> out(logits.size());
  std::vector<float> values(logits.data(), logits.data() + vocab);
  check(sampler.probabilities(values.data(), history, mask_bits(mask, vocab), out.mutable_data()));
  return out;
}

// `count` tokens drawn from the same logits, each appended to the history as if generated.
std::vector<int32_t> sample_draws(const Logits& logits, std::vector<int32_t> history, size_t count, bool grow,
                                  const py::kwargs& params) {
  Sampler sampler(static_cast<uint32_t>(logits.size()));
  check(sampler.begin(request_from(params), {}));
  std::vector<int32_t> drawn;
  const uint64_t start = history.size();
  for (size_t i = 0; i < count; ++i) {
    TokenEvent event;
    std::vector<float> values(logits.data(), logits.data() + logits.size());
    check(sampler.sample(values.data(), history, start + i, nullptr, &event));
    drawn.push_back(event.id);
    if (grow) history.push_back(event.id);
  }
  return drawn;
}

}  // namespace

void bind_sampler(py::module_& m) {
  m.def("sample_probs", &sample_probs, py::arg("logits"), py::arg("history") = std::vector<int32_t>{},
        py::arg("mask") = py::none(), py::arg("exempt") = std::vector<int32_t>{},
        "Probabilities float64 [vocab] that the sampler would draw from. Keyword arguments: see Engine.generate.");
  m.def("sample_draws", &sample_draws, py::arg("logits"), py::arg("history"), py::arg("count"), py::arg("grow") = false,
        "`count` draws from the same logits, at consecutive positions; with `grow` each joins the history.");
}

}  // namespace smoe
