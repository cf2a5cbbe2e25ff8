// What recurrent blocks share: the state they carry from position to position in place of keys and values, and the
// causal convolution before it. Positions are taken one after the other, each head (and slab of its values) by one
// task, so that a result does not depend on how the prompt was cut into chunks.
#pragma once

#include <cstdint>

#include "blocks/linear.h"
#include "blocks/workspace.h"
#include "smoe/model.h"

namespace smoe {

inline constexpr size_t kSlab = 64;  // values of a head that are taken through all positions together: they fit L1

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

struct ConvWeights {
  const float* weight = nullptr;  // [taps, channels]
  const float* bias = nullptr;    // [channels] or null
};

// Part of a layer's channels: [first, first + count) of its tail.
struct Channels {
  size_t first = 0, count = 0;
};

// out[t] = the convolution at x[t], for T rows; x and out may be the same rows. Leaves the tail for the next position.
void convolve(const Compute& c, const RecurrentSpec& spec, const ConvWeights& w, const RecurrentLayer& layer,
              Channels part, bool silu, const float* x, size_t x_stride, uint64_t position, size_t T, float* out,
              size_t out_stride);

// Values [first, first + count) of one head, and where their state lies.
struct Slab {
  size_t head = 0, first = 0, count = 0;
  float *state = nullptr, *kept = nullptr;  // [key_dim, count]
};

// Calls step(slab, t, worker) for every slab of every head, with t ascending from 0 to T for each of them.
template <class Step>
void scan(const Compute& c, const RecurrentSpec& spec, const RecurrentLayer& layer, uint64_t position, size_t T,
          Step&& step) {
  const size_t slabs = (spec.value_dim + kSlab - 1) / kSlab;
  c.pool->run(spec.heads * slabs, [&](size_t task, size_t worker) {
    Slab slab;
    slab.head = task / slabs;
    slab.first = task % slabs * kSlab;
    slab.count = spec.value_dim - slab.first < kSlab ? spec.value_dim - slab.first : kSlab;
    const size_t at = (slab.head * spec.value_dim + slab.first) * spec.key_dim;
    slab.state = layer.state + at;
    slab.kept = layer.kept_state + at;
    for (size_t t = 0; t < T; ++t) {
      if (layer.keeps(position + t))
        for (size_t i = 0; i < spec.key_dim * slab.count; ++i) slab.kept[i] = slab.state[i];
      step(slab, t, worker);
    }
  });
}

// log(1 + e^x), without overflow.
float softplus(float x);

}  // namespace smoe
