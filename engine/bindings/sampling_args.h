// Python keyword arguments -> Request, shared by the sampler's and the engine's bindings.
#pragma once

#include <pybind11/pybind11.h>

#include "smoe/session.h"

namespace smoe {

// Known names: temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty seed stop_ids bias
// session logprobs slide. An unknown one is Code::usage. Sampling that is not given is greedy without penalty.
Request request_from(const pybind11::kwargs& params);

}  // namespace smoe
