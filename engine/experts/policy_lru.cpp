// Least recently used: exact, by the order of uses.
#include "experts/policy.h"

namespace smoe {
namespace {

class Lru final : public Policy {
 public:
  explicit Lru(const ExpertTable& table) : last_use_(table.records(), 0) {}
  void turn(uint32_t, uint32_t) override {}
  void use(uint32_t record, uint32_t) override { last_use_[record] = static_cast<double>(++uses_); }
  double worth(uint32_t record) const override { return last_use_[record]; }

 private:
  uint64_t uses_ = 0;
  std::vector<double> last_use_;  // [record]
};

}  // namespace

std::unique_ptr<Policy> make_lru(const ExpertTable& table, uint32_t) { return std::make_unique<Lru>(table); }

}  // namespace smoe
