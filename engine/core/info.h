// The engine's description of itself, one line of JSON: the answer to INFO.
#pragma once

#include <string>

#include "io/reader.h"
#include "smoe/plan.h"

namespace smoe {

struct CacheInfo {
  std::string policy;
  uint32_t open_slots = 0;  // fewer than planned while the machine is short of memory
  uint32_t resident = 0;    // experts
  uint32_t warmed = 0;      // read without having been asked for, since the start
  bool warming = false;     // idle time has free slots to fill
};

std::string engine_info(const ModelSpec& model, const Plan& plan, const char* isa, const PlanOptions& options,
                        const ReadStats& reads, const CacheInfo& cache);

}  // namespace smoe
