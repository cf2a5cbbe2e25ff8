#include "smoe/plan.h"
#include "util/threads.h"

namespace smoe {

Result<Plan> plan_here(const ModelSpec& model, PlanOptions* options) {
  if (options->threads == 0) options->threads = usable_threads();
  if (options->float_activations) options->kv = KvType::f32;
  SMOE_ASSIGN(const MachineMemory machine, read_machine_memory());
  return make_plan(model, machine, *options);
}

}  // namespace smoe
