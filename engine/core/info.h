// The engine's description of itself, one line of JSON: the answer to INFO.
#pragma once

#include <string>

#include "io/reader.h"
#include "smoe/plan.h"

namespace smoe {

std::string engine_info(const ModelSpec& model, const Plan& plan, const char* isa, const PlanOptions& options,
                        const ReadStats& reads, const std::string& cache_policy);

}  // namespace smoe
