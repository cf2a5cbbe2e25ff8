// Whose rows a batch is made of. Sequences that have nothing to do with one another are computed together: matrices and
// experts see rows only, while a block that looks back in a sequence goes by these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "blocks/kv.h"

namespace smoe {

// The state of one layer of one session, after the position before the next.
struct RecurrentLayer {
  float* tail = nullptr;   // [taps - 1, channels] what the convolution still reads, oldest first
  float* state = nullptr;  // [heads, slabs, key_dim, values of the slab]
  // Both are copied here as they are before position `keep_at`, if it is among those computed.
  float* kept_tail = nullptr;
  float* kept_state = nullptr;
  uint64_t keep_at = UINT64_MAX;

  bool keeps(uint64_t position) const { return position == keep_at; }
};

// Rows [row, row + rows) of a batch: consecutive positions of one sequence.
struct SequenceRows {
  size_t row = 0, rows = 0;
  uint64_t position = 0;  // of the first of them
  // Of the layer at hand: the sequence's cache, or its state.
  const KvLayer* kv = nullptr;
  RecurrentLayer recurrent = {};

  uint64_t position_of(size_t batch_row) const { return position + (batch_row - row); }
};

// In the order of their rows, without gaps, none empty.
using Batch = std::span<const SequenceRows>;

inline const SequenceRows& sequence_of(Batch batch, size_t row) {
  size_t i = 0;
  while (row >= batch[i].row + batch[i].rows) ++i;
  return batch[i];
}

}  // namespace smoe
