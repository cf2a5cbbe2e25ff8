// In place of the expert cache, for a rehearsal: of each layer the first experts, twice as many as a token uses, in
// memory, for all others. The i-th expert that is asked for is the i-th of them, so that a token goes through as many
// bytes as it will, and an expert is the same one all through a chunk; where more are asked for they come again.
#pragma once

#include <memory>
#include <vector>

#include "experts/cache.h"
#include "util/aligned_buffer.h"
#include "vault/vault.h"

namespace smoe {

class StandIns final : public ExpertCache {
 public:
  static uint32_t count(const FfnSpec& ffn);  // of a layer
  // Reads them. Errors: Code::io, Code::resources.
  static Result<std::unique_ptr<StandIns>> load(const VaultFile& vault, const ReaderOptions& how);

  Status begin(uint32_t moe_layer, const uint32_t* experts, size_t count, const uint32_t* uses,
               uint32_t tokens) override;
  Result<bool> next(std::vector<ExpertRef>* out) override;
  void end() override { asked_.clear(); }
  const Residency& residency() const override { return residency_; }
  const Reader& reader() const override { return *reader_; }

  // Nothing is read, nothing gives way.
  void release(const ExpertRef&) override {}
  bool load(uint32_t, uint32_t, bool) override { return false; }
  bool takes_guesses(uint32_t) const override { return true; }  // routers are asked ahead as where experts are read
  void prefetch(uint32_t, const uint32_t*, size_t, uint32_t) override {}
  uint32_t settle(bool) override { return 0; }
  void resize(uint32_t) override {}
  uint8_t* lend(uint32_t) override { return nullptr; }
  uint32_t lent() const override { return 0; }
  uint32_t open_slots() const override { return residency_.slots(); }
  void seed(const std::vector<float>&) override {}
  uint32_t touched_slots() override { return 0; }
  CacheStats stats() const override { return {}; }

 private:
  explicit StandIns(const ExpertTable& table);
  Status read(const VaultFile& vault);

  Residency residency_;
  std::unique_ptr<Reader> reader_;
  AlignedBuffer memory_;
  std::vector<std::vector<const uint8_t*>> records_;  // [mixture layer][stand-in]
  std::vector<ExpertRef> asked_;
};

}  // namespace smoe
