// Which resident expert gives way: an order of worth over records, kept by what is asked for. Pure: no clock, no I/O,
// no randomness, so that a recorded trace replayed through the same policy ends with the same residents. A policy is
// one file; `policies.cpp` lists them by name.
//
// Records are numbered through the MoE layers in order. Time is counted in tokens, a clock to each layer, because a
// layer is asked once for each token whatever the others do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "smoe/status.h"

namespace smoe {

struct ExpertTable {
  std::vector<uint32_t> first_record;  // [moe layer]; one more at the end: the number of records
  std::vector<uint32_t> layer_of;      // [record]

  explicit ExpertTable(const std::vector<uint32_t>& experts_per_layer);
  uint32_t layers() const { return static_cast<uint32_t>(first_record.size() - 1); }
  uint32_t records() const { return first_record.back(); }
};

// Counts that outlive a process halve after so many tokens: some conversations.
inline constexpr uint32_t kHistoryHalfLife = 4096;

class Policy {
 public:
  virtual ~Policy() = default;
  // A fetch of `layer` on behalf of `tokens` tokens follows: use() for each record it asks for.
  virtual void turn(uint32_t layer, uint32_t tokens) = 0;
  // `record` of that layer was chosen by `uses` of the tokens. Residents first, then misses, each in the caller's
  // order.
  virtual void use(uint32_t record, uint32_t uses) = 0;
  // What `record` was used before the first turn, by earlier processes, as counts that halve every kHistoryHalfLife.
  virtual void seed(uint32_t /*record*/, double /*uses*/) {}
  // The resident worth the least gives way; of equals the one with the lowest number.
  virtual double worth(uint32_t record) const = 0;

  // Whether turns and uses of one layer never change the order of another layer's records among themselves: each
  // layer's residents are then sorted once a turn, and only the least of each are compared.
  virtual bool sorted_by_layer() const { return true; }
  // Residents drawn at random and compared for each victim; 0 = all residents are compared.
  virtual uint32_t sample() const { return 0; }
  // A layer is left this share of its even part of the slots, as long as another can give.
  virtual double floor_share() const { return 0; }
};

// `name` as `--cache-policy` takes it: one of policy_names(), with ":N" behind it for those that have a number to
// choose. Errors: Code::usage listing the names.
Result<std::unique_ptr<Policy>> make_policy(std::string_view name, const ExpertTable& table);
const std::vector<std::string>& policy_names();
inline constexpr const char* kDefaultPolicy = "decayed";  // the winner: LEARNED.md, 2026-11-30-cache-policies

// For policies.cpp. `number` is 0 where none was given.
std::unique_ptr<Policy> make_lru(const ExpertTable& table, uint32_t number);
std::unique_ptr<Policy> make_decayed(const ExpertTable& table, uint32_t number);
std::unique_ptr<Policy> make_floors(const ExpertTable& table, uint32_t number);
std::unique_ptr<Policy> make_lfru(const ExpertTable& table, uint32_t number);
std::unique_ptr<Policy> make_least_stale(const ExpertTable& table, uint32_t number);

}  // namespace smoe
