// The one forward path: a batch of T tokens through all layers; decode is T = 1.
#pragma once

#include <vector>

#include "core/kv_state.h"
#include "core/scratch.h"
#include "core/trunk.h"
#include "smoe/engine.h"

namespace smoe {

class Forward {
 public:
  // All references outlive the object. `spec`: experts a layer to read on a guess in decode, 0 = none.
  Forward(const ModelSpec& model, const Trunk& trunk, ExpertCache& cache, Workspace& ws, const Compute& compute,
          uint32_t spec = 0);

  // Computes ids[0, T) at `position`, appending to kv. Of the last layer only rows [first, T) are computed beyond their
  // keys and values; first == T when none of the chunk's logits will be asked for. T is at most the chunk.
  Status run(const KvState& kv, const int32_t* ids, size_t T, uint64_t position, size_t first);
  // Logits [rows, vocab] of rows [row, row + rows) of the last run, counted from its `first`; rows <= kHeadRows. Valid
  // until the next call.
  float* logits(size_t row, size_t rows);

  // Where the time since start_buckets() went, as far as it has been told; what happens between the calls of this class
  // is told by lap().
  void start_buckets() {
    buckets_ = {};
    lap_.restart();
  }
  void lap(double Buckets::* account) { lap_.into(&(buckets_.*account)); }
  const Buckets& buckets() const { return buckets_; }
  // While set, every run appends the experts it chose: [rows, moe_layers, top_k].
  void trace_into(std::vector<int32_t>* trace) { trace_ = trace; }

 private:
  Status embed(const int32_t* ids, size_t T);
  void fill_ropes(uint64_t position, size_t T);
  void mix(size_t i, const KvState& state, Activations& input, uint64_t position, size_t first);
  void recur(size_t i, const RecurrentLayer& state, Activations& input, uint64_t position, size_t first);
  Status layer(size_t i, const KvState& kv, size_t T, uint64_t position, size_t first);
  Status feed_forward(size_t i, float* x, size_t rows, size_t rows_of_next);
  Ahead ahead_of(size_t layer, const float* x, size_t rows) const;
  // x += what a block has put into ws_.block_out, [rows, hidden], after the norm that follows the block if there is
  // one.
  void add(float* x, const NormWeights& post_norm, size_t rows);
  // `input` becomes x [rows, hidden] as a block reads it: normalised, where the layer has a norm before the block.
  void read(const float* x, const NormWeights& norm, size_t rows, Activations* input);
  void normalize(const float* x, const NormWeights& norm, size_t rows, float* out);

  const ModelSpec& model_;
  const Trunk& trunk_;
  ExpertCache& cache_;
  Workspace& ws_;
  Compute compute_;
  const uint32_t spec_;  // experts a layer to read on a guess, in decode
  Buckets buckets_;
  Lap lap_;
  std::vector<ExpertRef> ready_;
  std::vector<int32_t>* trace_ = nullptr;
  std::vector<std::vector<uint32_t>> layer_trace_;  // [moe layer][row * top_k]
};

}  // namespace smoe
