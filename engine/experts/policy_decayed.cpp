// Frequency-decayed: the least used a token of its layer goes first, by counts that halve every so many tokens.
// `floors` is the same with a share of the slots kept for each layer.
#include "experts/policy.h"
#include "experts/usage.h"

namespace smoe {
namespace {

constexpr uint32_t kHalfLife = 64;  // tokens

class Decayed : public Policy {
 public:
  Decayed(const ExpertTable& table, uint32_t half_life)
      : half_life_(half_life != 0 ? half_life : kHalfLife), usage_(table, half_life_) {}
  void turn(uint32_t layer, uint32_t tokens) override { usage_.turn(layer, tokens); }
  void use(uint32_t record, uint32_t uses) override { usage_.use(record, uses); }
  void seed(uint32_t record, double uses) override { usage_.add(record, uses * half_life_ / kHistoryHalfLife); }
  double worth(uint32_t record) const override { return usage_.rate(record); }

 private:
  const uint32_t half_life_;
  Usage usage_;
};

class Floors final : public Decayed {
 public:
  using Decayed::Decayed;
  double floor_share() const override { return 0.5; }
};

}  // namespace

std::unique_ptr<Policy> make_decayed(const ExpertTable& table, uint32_t half_life) {
  return std::make_unique<Decayed>(table, half_life);
}
std::unique_ptr<Policy> make_floors(const ExpertTable& table, uint32_t half_life) {
  return std::make_unique<Floors>(table, half_life);
}

}  // namespace smoe
