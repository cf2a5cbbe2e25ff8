#include "blocks/recurrent.h"

#include <algorithm>
#include <cmath>

namespace smoe {
namespace {

constexpr size_t kChannelStep = 256;  // channels of one task

// Channels [c0, c0 + n) of one task: the rows before and those of x, by their number, row 0 being x's first.
struct Rows {
  const float* x;
  size_t stride;
  const float* before;  // [taps - 1, n], oldest first
  size_t held, n;
  const float* at(ptrdiff_t row) const {
    return row >= 0 ? x + static_cast<size_t>(row) * stride : before + static_cast<size_t>(row + ptrdiff_t(held)) * n;
  }
};

// The `held` rows before row `row` into a tail whose rows are `stride` apart.
void write_tail(const Rows& rows, size_t row, float* tail, size_t stride) {
  for (size_t i = 0; i < rows.held; ++i)
    std::copy_n(rows.at(static_cast<ptrdiff_t>(row + i) - static_cast<ptrdiff_t>(rows.held)), rows.n,
                tail + i * stride);
}

}  // namespace

void convolve(const Compute& c, const RecurrentSpec& spec, const ConvWeights& w, Batch batch, Channels part, bool silu,
              const float* x, size_t x_stride, float* out, size_t out_stride) {
  const size_t all = spec.channels(), held = spec.taps - 1, steps = (part.count + kChannelStep - 1) / kChannelStep;
  c.pool->run(batch.size() * steps, [&](size_t task, size_t) {
    const SequenceRows& sequence = batch[task / steps];
    const RecurrentLayer& layer = sequence.recurrent;
    const uint64_t position = sequence.position;
    const size_t T = sequence.rows, c0 = task % steps * kChannelStep;
    const size_t n = std::min(kChannelStep, part.count - c0), in_tail = part.first + c0;
    float before[kMaxTaps * kChannelStep];
    for (size_t i = 0; i < held; ++i) std::copy_n(layer.tail + i * all + in_tail, n, before + i * n);
    const Rows rows{x + sequence.row * x_stride + c0, x_stride, before, held, n};
    if (layer.keep_at >= position && layer.keep_at - position < T)
      write_tail(rows, layer.keep_at - position, layer.kept_tail + in_tail, all);
    write_tail(rows, T, layer.tail + in_tail, all);
    // The last row first, so that a row may be overwritten by its result.
    for (size_t t = T; t-- > 0;) {
      const float* of_tap[kMaxTaps];
      for (size_t j = 0; j < spec.taps; ++j)
        of_tap[j] = rows.at(static_cast<ptrdiff_t>(t + j) - static_cast<ptrdiff_t>(held));
      c.kernels->conv_row(of_tap, w.weight + c0, part.count, w.bias == nullptr ? nullptr : w.bias + c0, spec.taps, n,
                          silu, out + (sequence.row + t) * out_stride + c0);
    }
  });
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace smoe
