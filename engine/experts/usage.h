// How often each expert has been used lately: counts that halve every `half_life` tokens of their layer. All experts,
// not only residents. Kept as log2(count) + time / half_life, which stands still while time passes: counts of one age
// are compared without touching them.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "experts/policy.h"

namespace smoe {

class Usage {
 public:
  Usage(const ExpertTable& table, uint32_t half_life)
      : layer_of_(table.layer_of), now_(table.layers(), 0), height_(table.records(), kNever), half_life_(half_life) {}

  void turn(uint32_t layer, uint32_t tokens) { now_[layer] += tokens / half_life_; }
  void use(uint32_t record, uint32_t uses) { add(record, uses); }
  // As if `uses` had been counted now. 0 and less change nothing.
  void add(uint32_t record, double uses) {
    if (!(uses > 0)) return;
    const double now = now_[layer_of_[record]], before = height_[record] - now;  // kNever stays minus infinity
    height_[record] = now + (before < -60 ? std::log2(uses) : std::log2(std::exp2(before) + uses));
  }
  // Orders records by their counts; any layer's.
  double height(uint32_t record) const { return height_[record]; }
  double count(uint32_t record) const { return std::exp2(height_[record] - now_[layer_of_[record]]); }
  size_t records() const { return height_.size(); }

 private:
  static constexpr double kNever = -std::numeric_limits<double>::infinity();
  std::vector<uint32_t> layer_of_;
  std::vector<double> now_;     // [layer], in half-lives
  std::vector<double> height_;  // [record]
  double half_life_;
};

}  // namespace smoe
