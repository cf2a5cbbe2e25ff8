// A trace through a cache that has neither memory nor disk.
#include <algorithm>
#include <set>

#include "experts/trace.h"

namespace smoe {
namespace {

void count(uint64_t hits, uint64_t misses, const TraceEvent& e, ReplayCounts* n) {
  n->hits += hits;
  n->misses += misses;
  if (e.tokens != 1) return;
  n->decode_hits += hits;
  n->decode_misses += misses;
  if (e.layer == 0) ++n->steps;
}

void apply(const TraceEvent& e, bool resizes, Residency* residency) {
  switch (e.kind) {
    case TraceEvent::Kind::insert:
      residency->insert(e.record, e.may_evict, nullptr);
      break;
    case TraceEvent::Kind::drop:
      residency->drop(e.record);
      break;
    case TraceEvent::Kind::resize:
      if (resizes) residency->resize(e.slots, nullptr);
      break;
    default:
      residency->seed(e.counts);
  }
}

// Which record is needed how soon: for each fetch and expert of it, the number of the fetch that asks for it next.
class NextUses {
 public:
  explicit NextUses(const ExpertTable& table) : last_(table.records(), kNever) {}
  static constexpr uint64_t kNever = UINT64_MAX;
  // Fetches must be added from the last to the first.
  std::vector<uint64_t> add(uint64_t fetch, const std::vector<uint32_t>& records) {
    std::vector<uint64_t> next;
    for (uint32_t record : records) next.push_back(std::exchange(last_[record], fetch));
    return next;
  }

 private:
  std::vector<uint64_t> last_;
};

}  // namespace

Result<ReplayCounts> replay_trace(TraceReader& trace, const std::string& policy, uint32_t slots, uint64_t skip) {
  const TraceHeader& header = trace.header();
  SMOE_ASSIGN(std::unique_ptr<Policy> order, make_policy(policy.empty() ? header.policy : policy, trace.table()));
  const bool as_traced = slots == 0;
  if (as_traced) slots = header.slots;
  if (slots == 0) return Status(Code::usage, "a replay needs at least one slot");
  Residency residency(trace.table(), slots, std::move(order));
  ReplayCounts n;
  TraceEvent e;
  trace.rewind();
  for (uint64_t fetches = 0;;) {
    SMOE_ASSIGN(const bool more, trace.next(&e));
    if (!more) return n;
    if (e.kind != TraceEvent::Kind::fetch) {
      apply(e, as_traced, &residency);
      continue;
    }
    const Residency::Fetch& fetch = residency.fetch(e.layer, e.experts.data(), e.uses.empty() ? nullptr : e.uses.data(),
                                                    e.experts.size(), e.tokens);
    if (fetches++ < skip) continue;
    count(fetch.hits.size(), fetch.misses.size(), e, &n);
    n.evictions += fetch.evicted.size() + fetch.passing;
  }
}

Result<ReplayCounts> replay_optimal(TraceReader& trace, uint32_t slots, uint64_t skip) {
  if (slots == 0) return Status(Code::usage, "a replay needs at least one slot");
  std::vector<TraceEvent> fetches;
  std::vector<std::vector<uint32_t>> records;
  trace.rewind();
  for (TraceEvent e;;) {
    SMOE_ASSIGN(const bool more, trace.next(&e));
    if (!more) break;
    if (e.kind != TraceEvent::Kind::fetch) continue;
    records.emplace_back();
    for (uint32_t expert : e.experts) records.back().push_back(trace.table().first_record[e.layer] + expert);
    fetches.push_back(e);
  }
  NextUses uses(trace.table());
  std::vector<std::vector<uint64_t>> next(fetches.size());
  for (size_t i = fetches.size(); i-- > 0;) next[i] = uses.add(i, records[i]);

  ReplayCounts n;
  std::set<std::pair<uint64_t, uint32_t>> held;  // by when they are needed next
  std::vector<uint64_t> needed(trace.table().records(), NextUses::kNever);
  for (size_t i = 0; i < fetches.size(); ++i) {
    uint64_t hits = 0;
    for (size_t j = 0; j < records[i].size(); ++j) {
      const uint32_t record = records[i][j];
      hits += held.erase({needed[record], record});
      needed[record] = next[i][j];
    }
    for (size_t j = 0; j < records[i].size(); ++j) {
      if (next[i][j] != NextUses::kNever) held.insert({next[i][j], records[i][j]});
    }
    while (held.size() > slots) {
      held.erase(std::prev(held.end()));
      ++n.evictions;
    }
    if (i >= skip) count(hits, records[i].size() - hits, fetches[i], &n);
  }
  return n;
}

}  // namespace smoe
