#include "core/stand_ins.h"

#include <algorithm>

namespace smoe {
namespace {

constexpr size_t kReads = 8;  // in flight
// With as many as a token uses a small random model asked for its favourites half as often again; twice is near.
constexpr uint32_t kOfEachChoice = 2;

std::vector<uint32_t> experts_of(const VaultFile& vault) {
  std::vector<uint32_t> experts;
  for (const auto& layer : vault.records) experts.push_back(static_cast<uint32_t>(layer.size()));
  return experts;
}

}  // namespace

uint32_t StandIns::count(const FfnSpec& ffn) { return std::min(ffn.experts, kOfEachChoice * ffn.top_k); }

StandIns::StandIns(const ExpertTable& table) : residency_(table, 1, make_policy(kDefaultPolicy, table).value()) {}

Result<std::unique_ptr<StandIns>> StandIns::load(const VaultFile& vault, const ReaderOptions& how) {
  std::unique_ptr<StandIns> all(new StandIns(ExpertTable(experts_of(vault))));
  SMOE_ASSIGN(all->reader_, open_reader(vault.path, how, nullptr));
  SMOE_TRY(all->read(vault));
  return all;
}

Status StandIns::read(const VaultFile& vault) {
  std::vector<ReadRequest> reads;
  uint64_t bytes = 0;
  for (const LayerSpec& layer : vault.model.layers) {
    if (!layer.ffn.is_moe()) continue;
    const std::vector<ExpertRecord>& stored = vault.records[records_.size()];
    records_.emplace_back(count(layer.ffn));
    for (uint32_t i = 0; i < records_.back().size(); ++i) {
      reads.push_back({stored[i].offset, stored[i].length, nullptr, bytes});
      bytes += stored[i].length;
    }
  }
  SMOE_ASSIGN(memory_, AlignedBuffer::allocate(bytes));
  auto next = reads.begin();
  for (std::vector<const uint8_t*>& layer : records_)
    for (const uint8_t*& record : layer) record = memory_.data() + (next++)->tag;
  for (size_t begun = 0, done = 0; done < reads.size(); ++done) {
    for (; begun < std::min(reads.size(), done + kReads); ++begun) {
      reads[begun].buffer = memory_.data() + reads[begun].tag;
      reader_->submit(reads[begun]);
    }
    SMOE_TRY(reader_->wait().status);
  }
  return Status::ok();
}

Status StandIns::begin(uint32_t moe_layer, const uint32_t* experts, size_t count, const uint32_t*, uint32_t) {
  asked_.clear();
  const std::vector<const uint8_t*>& records = records_[moe_layer];
  for (uint32_t i = 0; i < count; ++i) asked_.push_back({experts[i], i, records[i % records.size()], 0});
  return Status::ok();
}

Result<bool> StandIns::next(std::vector<ExpertRef>* out) {
  const bool any = !asked_.empty();
  out->insert(out->end(), asked_.begin(), asked_.end());
  asked_.clear();
  return any;
}

}  // namespace smoe
