// Gated short convolution (Liquid AI's LFM2, 2025): in makes two gates and a value, gate_in * value is convolved over
// the last few positions, channel by channel, and gate_out * that goes through out.
#pragma once

#include "blocks/recurrent.h"

namespace smoe {

struct ShortConvWeights {
  Linear in;  // [3 * channels, hidden]: gate_in, gate_out, value
  ConvWeights conv;
  Linear out;  // [hidden, channels]
};

// As attention_gqa, with a state in place of the cache.
void short_conv(const Compute& c, const RecurrentSpec& spec, const ShortConvWeights& w, Batch batch, Workspace& ws,
                Activations& input, size_t first);

}  // namespace smoe
