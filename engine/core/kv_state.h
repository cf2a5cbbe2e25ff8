// The keys and values of one conversation, or what its recurrent layers have in their place, and the rule for how far
// back it can be rolled.
#pragma once

#include <vector>

#include "blocks/kv.h"
#include "core/recurrent_state.h"
#include "smoe/model.h"
#include "smoe/plan.h"
#include "util/aligned_buffer.h"

namespace smoe {

class KvState {
 public:
  static uint64_t bytes(const ModelSpec& model, uint32_t ctx, uint32_t chunk, KvType type);
  static Result<KvState> allocate(const ModelSpec& model, uint32_t ctx, uint32_t chunk, KvType type);

  const KvLayer& layer(size_t i) const { return layers_[i]; }
  RecurrentState& recurrent() { return recurrent_; }
  const RecurrentState& recurrent() const { return recurrent_; }

  // After positions [0, written) have been written: may the next query stand at `length` <= written? Only while every
  // row that it and its successors see is still in every ring. Of the rings alone; recurrent() has its own rule.
  bool can_roll_back(uint64_t written, uint64_t length) const;

 private:
  std::vector<KvLayer> layers_;
  AlignedBuffer memory_;
  RecurrentState recurrent_;
};

}  // namespace smoe
