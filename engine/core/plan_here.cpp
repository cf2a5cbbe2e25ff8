#include <optional>

#include "smoe/plan.h"
#include "util/ledger.h"
#include "util/threads.h"

namespace smoe {

Result<Plan> plan_here(const ModelSpec& model, PlanOptions* options, const std::string& ledger, bool reserve) {
  if (options->threads == 0) options->threads = usable_threads();
  if (options->float_activations) options->kv = KvType::f32;
  if (options->kv == KvType::q8)
    for (const LayerSpec& layer : model.layers)
      if (!layer.attention.is_recurrent() && layer.attention.head_dim % 32 != 0)
        return Status(
            Code::usage,
            "--kv q8 needs heads that 32 divides, and this model's are of " + std::to_string(layer.attention.head_dim),
            "use --kv f16");
  SMOE_ASSIGN(MachineMemory machine, read_machine_memory());
  // Locked until the budget stands in it: of two engines that start at once, the second must see the first's.
  std::optional<Ledger> book;
  Status trouble;
  if (!ledger.empty()) {
    Result<Ledger> opened = Ledger::open(ledger);
    trouble = opened.status();
    if (opened.is_ok()) book.emplace(std::move(opened).value());
  }
  if (book) machine.reserved_bytes = book->reserved_by_others();
  SMOE_ASSIGN(Plan plan, make_plan(model, machine, *options));
  if (book && reserve) trouble = book->reserve(taken_bytes(plan));
  if (!trouble.is_ok()) plan.warnings.push_back("other running engines are not counted: " + trouble.message());
  return plan;
}

}  // namespace smoe
