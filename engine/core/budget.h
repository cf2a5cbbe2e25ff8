// How much memory the engine takes: the arithmetic of the plan, apart from where its figures come from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smoe/status.h"

namespace smoe {

// One 8-byte page table entry for each 4096-byte page: what memory costs on top of itself. Not in a process's RSS, but
// charged to its control group.
inline uint64_t page_table_bytes(uint64_t memory_bytes) { return (memory_bytes + 511) / 512; }

struct BudgetQuestion {
  std::string model;         // for messages
  uint64_t floor_bytes = 0;  // of which min_expert_cache_bytes are expert cache, and chunk_slots of it to be lent
  uint64_t min_expert_cache_bytes = 0;
  uint64_t working_set_bytes = 0;  // what one token asks for
  uint64_t record_bytes = 0;       // the slot; 0 = a dense model
  uint32_t total_records = 0;
  uint32_t records_per_token = 0;
  uint32_t chunk_slots = 0;  // lent while a prompt is computed
  uint64_t usable_bytes = 0, ceiling_bytes = 0;
  uint64_t budget_bytes = 0;  // asked for; 0 = automatic
  uint32_t ring_slots = 0;    // asked for; 0 = automatic
};

struct BudgetAnswer {
  uint64_t budget_bytes = 0, expert_cache_bytes = 0;
  uint32_t slots = 0;        // for experts, when nothing is lent
  uint32_t cache_slots = 0;  // with those to be lent
  std::string reason;
  std::vector<std::string> warnings;
};

// Everything in memory: the floor, and a slot for each record that its smallest cache does not hold.
uint64_t all_resident_bytes(const BudgetQuestion& question);

// A slot beyond those of the floor costs its record and its page tables. Errors: Code::resources where the floor is
// above the memory, or what was asked for below the floor.
Result<BudgetAnswer> choose_budget(const BudgetQuestion& question);

}  // namespace smoe
