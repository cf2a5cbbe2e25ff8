#include "core/info.h"

#include <sstream>

#include "util/json.h"

namespace smoe {

std::string engine_info(const ModelSpec& model, const Plan& plan, const char* isa, const PlanOptions& options,
                        const ReadStats& reads, const CacheInfo& cache) {
  std::ostringstream out;
  out << "{\"version\":" << json_quote(SMOE_VERSION) << ",\"model\":" << json_quote(model.id)
      << ",\"model_type\":" << json_quote(model.model_type) << ",\"quant\":" << json_quote(model.quant)
      << ",\"vocab\":" << model.vocab << ",\"layers\":" << model.layers.size()
      << ",\"moe_layers\":" << model.moe_layers() << ",\"ctx\":" << plan.ctx << ",\"chunk\":" << plan.chunk
      << ",\"threads\":" << options.threads << ",\"isa\":" << json_quote(isa)
      << ",\"activations\":" << (options.float_activations ? "\"float\"" : "\"int8\"")
      << ",\"budget_bytes\":" << plan.budget_bytes << ",\"slots\":" << plan.slots
      << ",\"record_bytes\":" << plan.record_bytes << ",\"io\":" << json_quote(reads.backend)
      << ",\"cache_policy\":" << json_quote(cache.policy) << ",\"open_slots\":" << cache.open_slots
      << ",\"resident\":" << cache.resident << ",\"warmed\":" << cache.warmed
      << ",\"warming\":" << (cache.warming ? "true" : "false") << ",\"direct\":" << (reads.direct ? "true" : "false")
      << ",\"registered_slots\":" << reads.registered_slots << "}";
  return out.str();
}

}  // namespace smoe
