// Least frequently and recently used, with sampled victims: of a few residents drawn at random the one goes whose
// count, divided by the tokens since its last use, is the smallest. Comparing a few is enough to spare the frequent
// ones, costs nothing, and does not chase one's own tail as an exact order does when a token asks for more than there
// are slots.
#include "experts/policy.h"
#include "experts/usage.h"

namespace smoe {
namespace {

constexpr uint32_t kHalfLife = 1024;  // tokens
constexpr uint32_t kSample = 16;

class Lfru final : public Policy {
 public:
  Lfru(const ExpertTable& table, uint32_t sample)
      : layer_of_(table.layer_of),
        usage_(table, kHalfLife),
        now_(table.layers(), 0),
        last_use_(table.records(), 0),
        sample_(sample != 0 ? sample : kSample) {}
  void turn(uint32_t layer, uint32_t tokens) override {
    usage_.turn(layer, tokens);
    now_[layer] += tokens;
  }
  void use(uint32_t record, uint32_t uses) override {
    usage_.use(record, uses);
    last_use_[record] = now_[layer_of_[record]];
  }
  void seed(uint32_t record, double uses) override { usage_.add(record, uses * kHalfLife / kHistoryHalfLife); }
  double worth(uint32_t record) const override {
    return usage_.count(record) / static_cast<double>(1 + now_[layer_of_[record]] - last_use_[record]);
  }
  bool sorted_by_layer() const override { return false; }  // what it divides by differs between records
  uint32_t sample() const override { return sample_; }

 private:
  std::vector<uint32_t> layer_of_;
  Usage usage_;
  std::vector<uint64_t> now_;       // [layer], tokens
  std::vector<uint64_t> last_use_;  // [record], on its layer's clock
  const uint32_t sample_;
};

}  // namespace

std::unique_ptr<Policy> make_lfru(const ExpertTable& table, uint32_t sample) {
  return std::make_unique<Lfru>(table, sample);
}

}  // namespace smoe
