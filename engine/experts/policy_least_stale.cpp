// Least stale stays: an expert grows stale with each token for which its layer was asked and it was not. The stalest
// goes first; of equals the one whose layer is furthest from its next turn, because layers are asked in their order.
#include "experts/policy.h"

namespace smoe {
namespace {

class LeastStale final : public Policy {
 public:
  explicit LeastStale(const ExpertTable& table)
      : layer_of_(table.layer_of), now_(table.layers(), 0), last_use_(table.records(), 0) {}
  void turn(uint32_t layer, uint32_t tokens) override {
    layer_ = layer;
    now_[layer] += tokens;
  }
  void use(uint32_t record, uint32_t) override { last_use_[record] = now_[layer_of_[record]]; }
  double worth(uint32_t record) const override {
    const size_t layers = now_.size(), layer = layer_of_[record];
    const size_t distance = (layer + layers - layer_ - 1) % layers + 1;  // turns until it may be asked for
    return -static_cast<double>((now_[layer] - last_use_[record]) * layers + distance);
  }

 private:
  std::vector<uint32_t> layer_of_;
  std::vector<uint64_t> now_;       // [layer], tokens
  std::vector<uint64_t> last_use_;  // [record], on its layer's clock
  uint32_t layer_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_least_stale(const ExpertTable& table, uint32_t) {
  return std::make_unique<LeastStale>(table);
}

}  // namespace smoe
