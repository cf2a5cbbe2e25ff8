// The memory plan: one pure function, used by `smoe plan`, by every start of the engine and by the tests.
// All sizes in bytes. Source: design rules in ARCHITECTURE.md; figures of the published 64 GB machine are golden tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "smoe/model.h"
#include "smoe/status.h"

namespace smoe {

// What the machine offers. `usable` is the smallest of physical RAM and every finite cgroup limit up to the root.
struct MachineMemory {
  uint64_t physical_ram_bytes = 0;
  uint64_t usable_ram_bytes = 0;  // before what other engines have reserved
  uint64_t reserved_bytes = 0;    // promised to other running engines (ledger)
  uint64_t available_bytes = 0;   // MemAvailable: only ever a warning
  std::string limited_by;         // "physical RAM" or the path of the cgroup file that limits
};

// Reads /proc and the cgroup tree under `root` ("" = the real one; tests pass a fake tree).
Result<MachineMemory> read_machine_memory(const std::string& root = "");

// What could be taken now without pushing anything out but page cache: MemAvailable, or what is left of a control group
// up the tree (its file pages count as free). 0 bytes: unknown.
struct FreeMemory {
  uint64_t bytes = 0;
  // Where a group sets it, not the machine: its limit, and what its processes hold.
  uint64_t group_limit_bytes = 0, group_used_bytes = 0;
};
FreeMemory read_free_memory(const std::string& root = "");

enum class KvType : uint8_t { f16, f32, q8 };  // q8: blocks of 32 values, an f16 scale each

struct PlanOptions {
  uint64_t budget_bytes = 0;  // 0 = automatic
  uint32_t ring_slots = 0;    // 0 = automatic; with budget_bytes a usage error
  uint32_t ctx = 4096;        // window, tokens
  uint32_t chunk = 0;         // prefill chunk, tokens; 0 = the engine's choice (512, less where memory is short)
  uint32_t threads = 1;
  uint32_t sessions = 1;
  bool float_activations = false;
  KvType kv = KvType::f16;
  uint32_t experts_per_token = 0;  // 0 = the model's own
};

struct Plan {
  uint64_t trunk_bytes = 0, state_bytes = 0, scratch_bytes = 0, process_bytes = 0;
  uint64_t recurrent_bytes = 0;  // of state_bytes what does not grow with the window
  uint64_t record_bytes = 0;     // the slot: the largest record
  uint64_t min_expert_cache_bytes = 0, floor_bytes = 0, working_set_bytes = 0;
  uint64_t recommended_bytes = 0, all_experts_bytes = 0, all_resident_bytes = 0;
  uint64_t physical_ram_bytes = 0, usable_ram_bytes = 0, reserved_bytes = 0, ceiling_bytes = 0;
  uint64_t budget_bytes = 0, expert_cache_bytes = 0;
  uint32_t slots = 0, total_records = 0, ctx = 0, chunk = 0;
  // The expert cache's memory in slots, of which `chunk_slots` are lent to the buffers of a chunk while a prompt is
  // computed, and hold experts at all other times (`slots` counts them). They are part of scratch_bytes.
  uint32_t cache_slots = 0, chunk_slots = 0;
  std::string limited_by;  // what sets usable_ram_bytes
  std::string budget_reason;
  std::vector<std::string> warnings;
};

// What an engine of this plan takes at most: a budget may be more than the model has use for.
inline uint64_t taken_bytes(const Plan& plan) { return std::min(plan.budget_bytes, plan.all_resident_bytes); }

// The model as the engine will run it: with --experts-per-token, fewer experts a token, never more.
ModelSpec as_run(ModelSpec model, const PlanOptions& options);

// Errors: Code::usage (budget and ring together, ctx 0, more experts a token than the model's own), Code::resources
// (budget under the floor, floor over usable).
Result<Plan> make_plan(const ModelSpec& model, const MachineMemory& machine, const PlanOptions& options);

// The plan of an engine that starts here and now: make_plan on this machine, after `options` has been filled in where
// it leaves the choice to the engine (threads 0: all that may be used; float activations keep float32 keys and values).
// `ledger` is the file in which engines tell each other what they take ("" = none): what the others have is not there
// for this one, and with `reserve` the budget is written into it, until this process ends. A ledger that cannot be used
// is a warning of the plan.
Result<Plan> plan_here(const ModelSpec& model, PlanOptions* options, const std::string& ledger = "",
                       bool reserve = false);

}  // namespace smoe
