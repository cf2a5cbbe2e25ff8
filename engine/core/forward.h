// The one forward path: a batch of tokens through all layers, of one sequence or of several; decode is one row each.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "blocks/batch.h"
#include "core/kv_state.h"
#include "core/scratch.h"
#include "core/trunk.h"
#include "smoe/engine.h"

namespace smoe {

// What one sequence adds to a batch: ids[0, rows) at `position`, to be appended to its state. The logits of rows
// [first, rows) may be asked for; first == rows: of none.
struct Part {
  const KvState* kv = nullptr;
  const int32_t* ids = nullptr;
  size_t rows = 0;
  uint64_t position = 0;
  size_t first = 0;
};

class Forward {
 public:
  // All references outlive the object. `spec`: experts a layer to read on a guess in decode, 0 = none.
  Forward(const ModelSpec& model, const Trunk& trunk, ExpertCache& cache, Workspace& ws, const Compute& compute,
          uint32_t spec = 0);

  // Computes all parts together; their rows are a chunk at most, and no two parts have the same state. Of the last
  // layer only keys and values are computed for the rows before the first one that is wanted: the part with the most
  // rows that are not belongs at the front. A row's result does not depend on what is computed beside it. After an
  // error what was written for these rows has no meaning, and they may be computed again.
  Status run(std::span<const Part> parts);
  // Logits [rows, vocab] of rows [row, row + rows) of the last run's wanted ones, in the order of its parts; rows <=
  // kHeadRows. Valid until the next call.
  float* logits(size_t row, size_t rows);
  // Copies a wanted row's hidden state, [hidden], and makes logits [rows.size(), vocab] of such rows later, between
  // runs; rows.size() <= kHeadRows and a chunk.
  void keep(size_t row, float* hidden) const { std::copy_n(ws_.x + row * model_.hidden, model_.hidden, hidden); }
  float* logits_of(std::span<const float* const> rows);

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
  // Lays the parts' rows out: batch_ and ids_. Returns the first row that is wanted.
  size_t lay_out(std::span<const Part> parts);
  Status embed();
  void fill_ropes();
  void mix(size_t i, Activations& input, size_t first);
  void recur(size_t i, Activations& input, size_t first);
  Status layer(size_t i, std::span<const Part> parts, size_t first);
  // The wanted rows of the stream move to the front, where logits() finds them.
  void gather_wanted(std::span<const Part> parts);
  float* head(const float* x, size_t rows);
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
  std::vector<SequenceRows> batch_;
  std::vector<int32_t> ids_;  // of the batch's rows
  std::vector<ExpertRef> ready_;
  std::vector<int32_t>* trace_ = nullptr;
  std::vector<std::vector<uint32_t>> layer_trace_;  // [moe layer][row * top_k]
};

}  // namespace smoe
