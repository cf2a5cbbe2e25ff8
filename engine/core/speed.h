// How fast a model will run under a plan, before it has run: from the rates of the machine (core/rates.h), the
// geometry, and how many experts will be found in the cache. Pure.
//
// A token: what is active is read from memory once, what is not found is read from disk, and the two add up (see
// layer_seconds). A prompt: whole layers are read in order ahead of the computation.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rates.h"
#include "smoe/model.h"
#include "smoe/plan.h"

namespace smoe {

struct Speed {
  double hit_rate = 0;  // of decoding, expected
  bool from_history = false;
  double decode_tok_s = 0, decode_low_tok_s = 0, decode_high_tok_s = 0;
  double prefill_tok_s = 0;  // of a prompt of kPromptTokens, nothing of it held
};
inline constexpr uint32_t kPromptTokens = 512;

// The share of a token's experts found by a cache of `slots`, which holds the most used; what is read on a guess a
// moment before it is asked for is not found. Without history (empty, else decayed counts [record]) the most popular
// share x of a layer's experts is taken to have 1 - (1 - x)^1.5 of its uses: between even routing (exponent 1) and what
// real text was measured to have (2); see LEARNED.md, 2026-11-30-locality-model. With history: what was counted, layer
// by layer, drawn to that line while fewer than some tens of tokens were counted.
double expected_hit_rate(const ModelSpec& model, uint32_t slots, const std::vector<float>& history);

Speed predict_speed(const ModelSpec& model, const Plan& plan, const Rates& rates, const std::vector<float>& history);

}  // namespace smoe
