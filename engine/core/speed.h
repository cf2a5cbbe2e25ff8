// How fast a model will run under a plan, before it has run: what a pass costs in memory (core/rehearsal.h), what its
// reads cost on this disk (core/rates.h), and how many experts will be found in the cache. Pure.
//
// A token: the pass, and the reads of what is not found; of those one a layer is read on a guess while the layer's
// attention is computed. A prompt: every expert it asks for is read once, ahead of the computation as far as there is
// room for what is read ahead.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rates.h"
#include "core/rehearsal.h"
#include "smoe/model.h"
#include "smoe/plan.h"

namespace smoe {

struct Speed {
  double hit_rate = 0;  // of decoding, expected
  bool from_history = false;
  double decode_tok_s = 0, decode_low_tok_s = 0, decode_high_tok_s = 0;
  double prefill_tok_s = 0;  // of a prompt of kPromptTokens, nothing of it held
};

// The share of a token's experts found by a cache of `slots`; what is read on a guess a moment before it is asked for
// is not found. Without history (empty, else decayed counts [record]) it is `rehearsed`, what a rehearsal found with so
// many slots. With some hundreds of tokens counted it is the mean of that and of what the most used records would give:
// counts do not know that uses come in clusters, and a rehearsal does not know what people write.
double expected_hit_rate(const ModelSpec& model, uint32_t slots, double rehearsed, const std::vector<float>& history);

Speed predict_speed(const ModelSpec& model, const Plan& plan, const Rates& rates, const Rehearsal& rehearsal,
                    const std::vector<float>& history);

}  // namespace smoe
