// What recurrent blocks share: the state they carry from position to position in place of keys and values, and the
// causal convolution before it. Positions are taken one after the other, each head (and slab of its values) by one
// task, so that a result does not depend on how the prompt was cut into chunks.
#pragma once

#include <cstdint>

#include "blocks/batch.h"
#include "blocks/linear.h"
#include "blocks/workspace.h"
#include "smoe/model.h"

namespace smoe {

inline constexpr size_t kSlab = 64;  // values of a head that are taken through all positions together: they fit L1

struct ConvWeights {
  const float* weight = nullptr;  // [taps, channels]
  const float* bias = nullptr;    // [channels] or null
};

// Part of a layer's channels: [first, first + count) of its tail.
struct Channels {
  size_t first = 0, count = 0;
};

// out[t] = the convolution at x[t], for all rows of the batch; x and out may be the same rows. Leaves the tails for the
// next positions.
void convolve(const Compute& c, const RecurrentSpec& spec, const ConvWeights& w, Batch batch, Channels part, bool silu,
              const float* x, size_t x_stride, float* out, size_t out_stride);

// Values [first, first + count) of one head, and where their state lies.
struct Slab {
  size_t head = 0, first = 0, count = 0;
  float *state = nullptr, *kept = nullptr;  // [key_dim, count]
};

// Calls step(slab, t, worker) for every slab of every head of every sequence, with t ascending over the sequence's rows
// of the batch for each of them.
template <class Step>
void scan(const Compute& c, const RecurrentSpec& spec, Batch batch, Step&& step) {
  const size_t slabs = (spec.value_dim + kSlab - 1) / kSlab, tasks = spec.heads * slabs;
  c.pool->run(batch.size() * tasks, [&](size_t task, size_t worker) {
    const SequenceRows& sequence = batch[task / tasks];
    const RecurrentLayer& layer = sequence.recurrent;
    Slab slab;
    slab.head = task % tasks / slabs;
    slab.first = task % slabs * kSlab;
    slab.count = spec.value_dim - slab.first < kSlab ? spec.value_dim - slab.first : kSlab;
    const size_t at = (slab.head * spec.value_dim + slab.first) * spec.key_dim;
    slab.state = layer.state + at;
    slab.kept = layer.kept_state + at;
    for (size_t t = sequence.row; t < sequence.row + sequence.rows; ++t) {
      if (layer.keeps(sequence.position_of(t)))
        for (size_t i = 0; i < spec.key_dim * slab.count; ++i) slab.kept[i] = slab.state[i];
      step(slab, t, worker);
    }
  });
}

// log(1 + e^x), without overflow.
float softplus(float x);

}  // namespace smoe
