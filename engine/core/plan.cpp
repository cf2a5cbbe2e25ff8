// The memory plan: what the engine's parts need, and from that the budget. Pure: machine and model come in as numbers.
#include "smoe/plan.h"

#include <algorithm>

#include "core/budget.h"
#include "core/footprint.h"
#include "util/sizes.h"

namespace smoe {
namespace {

constexpr uint32_t kLargestChunk = 512, kSmallestChunk = 32;  // tokens

// What the engine's process holds besides the buffers of the plan, measured on the running engine (5 MB of code and
// library pages, under 1 MB of heap) with room for the allocator; per thread its stack and the allocator's arena; for
// each expert its table entry and its place in the cache; for each position of the window the request's ids, as text
// and twice as numbers, and for each further session its ids three times, with room to grow.
constexpr uint64_t kProcessBytes = 16u << 20;
constexpr uint64_t kThreadBytes = 256u << 10;
constexpr uint64_t kRecordBytes = 128;
constexpr uint64_t kPositionBytes = 64, kSessionPositionBytes = 24;

Status check_options(const PlanOptions& o) {
  if (o.budget_bytes != 0 && o.ring_slots != 0) {
    return {Code::usage, "--budget and --ring both size the expert cache", "give one of them"};
  }
  if (o.ctx == 0) return {Code::usage, "--ctx must be at least 1"};
  if (o.sessions == 0) return {Code::usage, "--sessions must be at least 1"};
  return Status::ok();
}

}  // namespace

ModelSpec as_run(ModelSpec model, const PlanOptions& o) {
  for (LayerSpec& layer : model.layers) {
    if (o.experts_per_token != 0) layer.ffn.top_k = std::min(layer.ffn.top_k, o.experts_per_token);
  }
  return model;
}

namespace {

// What the plan knows before any memory is divided.
struct Experts {
  uint64_t slot = 0, working_set = 0;
  uint32_t records = 0, per_token = 0, top_k = 0;

  explicit Experts(const ModelSpec& model) {
    for (const LayerSpec& layer : model.layers) {
      if (!layer.ffn.is_moe()) continue;
      const uint64_t record = record_layout(layer.ffn, model.hidden).length;
      slot = std::max(slot, record);
      working_set += layer.ffn.top_k * record;
      records += layer.ffn.experts;
      per_token += layer.ffn.top_k;
      top_k = std::max(top_k, layer.ffn.top_k);
    }
  }
  uint64_t least() const { return std::min(2 * top_k, records) * slot; }
};

Status check_experts(const ModelSpec& stored, const PlanOptions& o) {
  const uint32_t own = Experts(stored).top_k;
  if (o.experts_per_token <= own) return Status::ok();
  const std::string flag = "--experts-per-token " + std::to_string(o.experts_per_token);
  if (own == 0) return {Code::usage, flag + ": this model has no experts"};
  return {Code::usage, flag + ": the model's own number is " + std::to_string(own), "1 to " + std::to_string(own)};
}

// Everything but the expert cache, for one size of the prefill chunk.
void measure(const ModelSpec& model, const PlanOptions& o, const Experts& experts, Plan* p) {
  p->state_bytes = engine_state_bytes(model, o, p->chunk);
  p->recurrent_bytes = engine_recurrent_bytes(model, o);
  p->scratch_bytes = engine_scratch_bytes(model, o, p->chunk);
  const uint64_t chunk = engine_chunk_bytes(model, o, p->chunk);
  p->chunk_slots = experts.slot == 0 ? 0 : static_cast<uint32_t>((chunk + experts.slot - 1) / experts.slot);
  p->scratch_bytes += p->chunk_slots * experts.slot;
  const uint64_t parts = p->trunk_bytes + p->state_bytes + p->scratch_bytes;
  p->min_expert_cache_bytes = experts.least();
  p->process_bytes = kProcessBytes + std::max(1u, o.threads) * kThreadBytes + experts.records * kRecordBytes +
                     o.ctx * (kPositionBytes + (o.sessions - 1) * kSessionPositionBytes) +
                     page_table_bytes(parts + p->min_expert_cache_bytes);
  p->floor_bytes = parts + p->process_bytes + p->min_expert_cache_bytes;
}

// 512 tokens unless the buffers for them take too much of the memory there is, or keep a budget from being enough. They
// are lent by the expert cache, so that decoding loses nothing by them.
void choose_chunk(const ModelSpec& model, const PlanOptions& o, const Experts& experts, Plan* p) {
  const uint64_t limit = o.budget_bytes != 0 ? o.budget_bytes : p->ceiling_bytes;
  p->chunk = o.chunk != 0 ? o.chunk : kLargestChunk;
  measure(model, o, experts, p);
  const auto too_large = [&] { return p->scratch_bytes > p->usable_ram_bytes / 4 || p->floor_bytes > limit; };
  while (o.chunk == 0 && p->chunk > kSmallestChunk && too_large()) {
    p->chunk /= 2;
    measure(model, o, experts, p);
  }
}

// No window beyond what the model was trained for. That the default is too long for it is nothing to warn of.
PlanOptions within_the_model(const ModelSpec& model, PlanOptions o, Plan* p) {
  if (model.max_positions == 0 || o.ctx <= model.max_positions) return o;
  if (o.ctx != PlanOptions().ctx) {
    p->warnings.push_back("the model's own limit is " + std::to_string(model.max_positions) + " tokens, so --ctx " +
                          std::to_string(o.ctx) + " is lowered to it");
  }
  o.ctx = model.max_positions;
  return o;
}

}  // namespace

Result<Plan> make_plan(const ModelSpec& stored, const MachineMemory& machine, const PlanOptions& asked) {
  SMOE_TRY(check_options(asked));
  SMOE_TRY(check_experts(stored, asked));
  Plan p;
  const ModelSpec model = as_run(stored, asked);
  const PlanOptions o = within_the_model(model, asked, &p);
  const Experts experts(model);
  p.ctx = o.ctx;
  p.physical_ram_bytes = machine.physical_ram_bytes;
  p.reserved_bytes = machine.reserved_bytes;
  p.limited_by = machine.limited_by;
  p.usable_ram_bytes = machine.usable_ram_bytes - std::min(machine.usable_ram_bytes, machine.reserved_bytes);
  p.ceiling_bytes = p.usable_ram_bytes / 4 * 3;
  p.trunk_bytes = engine_trunk_bytes(model);
  p.record_bytes = experts.slot;
  p.total_records = experts.records;
  p.all_experts_bytes = experts.records * experts.slot;
  p.working_set_bytes = experts.working_set;
  choose_chunk(model, o, experts, &p);
  p.recommended_bytes = p.floor_bytes + std::min(3 * p.working_set_bytes, p.all_experts_bytes);
  const BudgetQuestion question{model.id.empty() ? "the model" : model.id,
                                p.floor_bytes,
                                p.min_expert_cache_bytes,
                                p.working_set_bytes,
                                p.record_bytes,
                                p.total_records,
                                experts.per_token,
                                p.chunk_slots,
                                p.usable_ram_bytes,
                                p.ceiling_bytes,
                                o.budget_bytes,
                                o.ring_slots};
  p.all_resident_bytes = all_resident_bytes(question);
  SMOE_ASSIGN(const BudgetAnswer answer, choose_budget(question));
  p.budget_bytes = answer.budget_bytes;
  p.expert_cache_bytes = answer.expert_cache_bytes;
  p.slots = answer.slots;
  p.cache_slots = answer.cache_slots;
  p.budget_reason = answer.reason;
  p.warnings.insert(p.warnings.end(), answer.warnings.begin(), answer.warnings.end());
  if (machine.available_bytes != 0 && machine.available_bytes < p.budget_bytes) {
    p.warnings.push_back("only " + show_bytes(machine.available_bytes) +
                         " of memory are free now, less than the budget of " + show_bytes(p.budget_bytes));
  }
  return p;
}

}  // namespace smoe
