// How often each expert has been used lately: counts that halve every `half_life` tokens of their layer. All experts,
// not only residents. Kept as log2(count) + time / half_life, which stands still while time passes: counts of one age
// are compared without touching them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "experts/policy.h"

namespace smoe {

class Usage {
 public:
  Usage(const ExpertTable& table, uint32_t half_life)
      : layer_of_(table.layer_of), layers_(table.layers()), height_(table.records(), kNever), half_life_(half_life) {}

  void turn(uint32_t layer, uint32_t tokens) {
    Layer& l = layers_[layer];
    l.now += tokens / half_life_;
    l.counted *= std::exp2(-(tokens / half_life_));
    l.tokens = tokens;
    l.chosen = 0;
    level(&l);
  }
  void use(uint32_t record, uint32_t uses) {
    layers_[layer_of_[record]].chosen += uses;
    add(record, uses);
  }
  // As if `uses` had been counted now. 0 and less change nothing.
  void add(uint32_t record, double uses) {
    if (!(uses > 0)) return;
    Layer& l = layers_[layer_of_[record]];
    const double before = height_[record] - l.now;  // kNever stays minus infinity
    height_[record] = l.now + (before < -60 ? std::log2(uses) : std::log2(std::exp2(before) + uses));
    l.counted += uses;
    level(&l);
  }
  // Orders records by how often a token of their layer uses them, which is what can be compared between layers: their
  // clocks differ, because of a prompt the last one is asked for a single row. A layer that few tokens have asked is
  // not believed beyond that.
  double rate(uint32_t record) const { return height_[record] - layers_[layer_of_[record]].level; }
  double count(uint32_t record) const { return std::exp2(height_[record] - layers_[layer_of_[record]].now); }
  size_t records() const { return height_.size(); }

 private:
  struct Layer {
    double now = 0;                 // in half-lives
    double counted = 0;             // all of its counts
    double tokens = 1, chosen = 1;  // of the last turn
    double level = 0;               // height of a record that every token uses
  };
  static void level(Layer* l) {
    const double a_token = std::max(l->chosen, 1.0) / l->tokens;
    l->level = l->now + std::log2(l->counted / a_token + kFewTokens);
  }
  static constexpr double kFewTokens = 16;
  static constexpr double kNever = -std::numeric_limits<double>::infinity();
  std::vector<uint32_t> layer_of_;
  std::vector<Layer> layers_;
  std::vector<double> height_;  // [record]
  double half_life_;
};

}  // namespace smoe
