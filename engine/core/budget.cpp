#include "core/budget.h"

#include <algorithm>

#include "util/sizes.h"

namespace smoe {
namespace {

uint64_t all_experts(const BudgetQuestion& q) { return q.total_records * q.record_bytes; }
uint64_t least_slots(const BudgetQuestion& q) {
  return q.record_bytes == 0 ? 0 : q.min_expert_cache_bytes / q.record_bytes;
}
uint64_t slot_price(const BudgetQuestion& q) { return q.record_bytes + page_table_bytes(q.record_bytes); }
uint64_t budget_of(const BudgetQuestion& q, uint64_t slots) {
  return q.floor_bytes + (slots - least_slots(q)) * slot_price(q);
}

Status check_floor(const BudgetQuestion& q) {
  const std::string least = q.model + " needs at least " + show_bytes(q.floor_bytes);
  if (q.floor_bytes > q.usable_bytes) {
    return {Code::resources, least + ", and " + show_bytes(q.usable_bytes) + " of memory are usable",
            "a smaller --ctx or fewer --sessions lower the floor; `smoe plan` shows what it is made of"};
  }
  if (q.budget_bytes != 0 && q.budget_bytes < q.floor_bytes) {
    return {Code::resources, least + "; the budget is " + show_bytes(q.budget_bytes),
            "give --budget " + std::to_string(q.floor_bytes) + " or more, or a smaller --ctx"};
  }
  const uint64_t least_slots = q.record_bytes == 0 ? 0 : q.min_expert_cache_bytes / q.record_bytes;
  if (q.ring_slots != 0 && q.ring_slots < least_slots) {
    return {Code::resources,
            q.model + " needs an expert cache of at least " + std::to_string(least_slots) + " slots; the ring is " +
                std::to_string(q.ring_slots),
            "give --ring " + std::to_string(least_slots) + " or more, or leave it out"};
  }
  return Status::ok();
}

// The budget of a machine left to itself.
void choose_automatic(const BudgetQuestion& q, BudgetAnswer* a) {
  const std::string ceiling = "3/4 of the usable memory (" + show_bytes(q.ceiling_bytes) + ")";
  if (all_resident_bytes(q) <= q.ceiling_bytes) {
    a->budget_bytes = all_resident_bytes(q);
    a->reason = q.record_bytes == 0 ? "the whole model fits under " + ceiling : "all experts fit under " + ceiling;
    return;
  }
  a->budget_bytes = q.floor_bytes;
  const uint64_t room = q.ceiling_bytes > q.floor_bytes ? q.ceiling_bytes - q.floor_bytes : 0;
  const uint64_t sets = q.working_set_bytes == 0 ? 0 : room / q.working_set_bytes;
  if (sets >= 1) {
    a->budget_bytes += sets * q.working_set_bytes;
    a->reason = "the floor and " + std::to_string(sets) + (sets == 1 ? " working set" : " working sets") +
                ", the most that fit under " + ceiling;
    return;
  }
  a->reason = "the floor: no working set fits on top of it under " + ceiling;
  a->warnings.push_back("memory is short: only the floor fits");
  if (q.floor_bytes > q.ceiling_bytes) {
    a->warnings.push_back("the floor of " + show_bytes(q.floor_bytes) + " is above " + ceiling +
                          "; the machine may slow down as a whole");
  }
}

}  // namespace

uint64_t all_resident_bytes(const BudgetQuestion& q) { return budget_of(q, q.total_records); }

Result<BudgetAnswer> choose_budget(const BudgetQuestion& q) {
  SMOE_TRY(check_floor(q));
  BudgetAnswer a;
  if (q.budget_bytes != 0) {
    a.budget_bytes = q.budget_bytes;
    a.reason = "as asked for with --budget";
  } else if (q.ring_slots != 0) {
    a.budget_bytes = budget_of(q, std::min(q.ring_slots, q.total_records));
    a.reason = "as asked for with --ring";
  } else {
    choose_automatic(q, &a);
  }
  const uint64_t extra = a.budget_bytes - q.floor_bytes;
  const uint64_t lent = q.chunk_slots * q.record_bytes;
  a.expert_cache_bytes = std::min(extra + q.min_expert_cache_bytes + lent, all_experts(q));
  if (q.record_bytes != 0) {
    const uint64_t slots = std::min<uint64_t>(least_slots(q) + extra / slot_price(q), q.total_records);
    a.cache_slots = static_cast<uint32_t>(slots + q.chunk_slots);
    a.slots = std::min(a.cache_slots, q.ring_slots != 0 ? std::min(q.ring_slots, q.total_records) : q.total_records);
  }
  if ((q.budget_bytes != 0 || q.ring_slots != 0) && a.budget_bytes > q.ceiling_bytes) {
    a.warnings.push_back("a budget of " + show_bytes(a.budget_bytes) + " is above 3/4 of the usable memory (" +
                         show_bytes(q.ceiling_bytes) + "); measured elsewhere: more hits, and far slower");
  }
  if (a.slots < q.records_per_token) {
    a.warnings.push_back("the cache holds " + std::to_string(a.slots) + " experts and one token asks for " +
                         std::to_string(q.records_per_token) +
                         ": most are read anew for each token; what is used most stays, under --cache-policy lru "
                         "nothing would and about 0% were hits");
  }
  return a;
}

}  // namespace smoe
