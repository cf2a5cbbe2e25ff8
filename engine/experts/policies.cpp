#include <algorithm>
#include <iterator>

#include "experts/policy.h"
#include "util/numbers.h"

namespace smoe {
namespace {

struct Entry {
  const char* name;
  std::unique_ptr<Policy> (*make)(const ExpertTable& table, uint32_t number);
};

constexpr Entry kPolicies[] = {
    {"lru", make_lru},   {"decayed", make_decayed},         {"floors", make_floors},
    {"lfru", make_lfru}, {"least-stale", make_least_stale},
};

}  // namespace

ExpertTable::ExpertTable(const std::vector<uint32_t>& experts_per_layer) {
  first_record.push_back(0);
  for (uint32_t layer = 0; layer < experts_per_layer.size(); ++layer) {
    first_record.push_back(first_record.back() + experts_per_layer[layer]);
    layer_of.insert(layer_of.end(), experts_per_layer[layer], layer);
  }
}

const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Entry& entry : kPolicies) all.emplace_back(entry.name);
    return all;
  }();
  return names;
}

Result<std::unique_ptr<Policy>> make_policy(std::string_view name, const ExpertTable& table) {
  const size_t colon = std::min(name.find(':'), name.size());
  uint32_t number = 0;
  const bool numbered = colon < name.size();
  const auto entry = std::find_if(std::begin(kPolicies), std::end(kPolicies),
                                  [&](const Entry& e) { return e.name == name.substr(0, colon); });
  if (entry == std::end(kPolicies) || (numbered && (!parse_number(name.substr(colon + 1), &number) || number == 0))) {
    std::string hint = "there are";
    for (const std::string& known : policy_names()) hint += " " + known;
    return Status(Code::usage, "there is no cache policy '" + std::string(name) + "'", hint);
  }
  return entry->make(table, number);
}

}  // namespace smoe
