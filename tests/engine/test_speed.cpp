#include <algorithm>
#include <cmath>

#include "check.h"
#include "core/speed.h"

using namespace smoe;

namespace {

// `layers` mixtures of 16 experts, top-2.
ModelSpec mixture(uint32_t layers = 4) {
  ModelSpec m;
  m.hidden = 256;
  for (uint32_t i = 0; i < layers; ++i) {
    LayerSpec layer;
    layer.ffn.experts = 16;
    layer.ffn.top_k = 2;
    m.layers.push_back(layer);
  }
  return m;
}

// Rates such that times can be told apart.
Rates rates() {
  Rates r;
  r.read_first_s = 1e-4;
  r.read_each_s = 1e-3;
  return r;
}

Rehearsal rehearsal(double hit_rate = 0.5) {
  Rehearsal r;
  r.token_s = 5e-3;
  r.attention_s = 2e-4;
  r.prompt_s = 0.1;
  r.prompt_experts = 16;
  r.hit_rate = hit_rate;
  return r;
}

Plan plan_of(uint32_t slots) {
  Plan p;
  p.slots = p.cache_slots = slots;
  p.total_records = 64;
  p.chunk = 512;
  return p;
}

}  // namespace

TEST(speed_hit_rate_is_the_rehearsals_until_something_was_counted) {
  const ModelSpec m = mixture();
  CHECK_EQ(expected_hit_rate(m, 32, 0.61, {}), 0.61);
  std::vector<float> little(64, 0.0f);
  little[0] = 1;
  CHECK(std::abs(expected_hit_rate(m, 32, 0.61, little) - 0.61) < 0.04);  // one token says little
  CHECK_EQ(expected_hit_rate(m, 64, 1, little), 1.0);
}

TEST(speed_hit_rate_with_history) {
  const ModelSpec m = mixture();
  std::vector<float> even(64, 1e6f), skewed(64, 1.0f);
  for (uint32_t layer = 0; layer < 4; ++layer) skewed[layer * 16 + 3] = skewed[layer * 16 + 7] = 1e6f;
  CHECK(std::abs(expected_hit_rate(m, 32, 0.7, even) - (0.7 + 0.97 * 0.5) / 2) < 1e-3);
  CHECK(std::abs(expected_hit_rate(m, 8, 0.2, skewed) - (0.2 + 0.97) / 2) < 1e-3);
  // A layer that was counted a thousand times less, as the last one is in prompts, is not less used.
  for (uint32_t e = 0; e < 16; ++e) skewed[48 + e] *= 1e-3f;
  CHECK(std::abs(expected_hit_rate(m, 8, 0.2, skewed) - (0.2 + 0.97) / 2) < 1e-2);
  // One that was never asked is taken to be even.
  std::fill(even.begin() + 48, even.end(), 0.0f);
  CHECK(std::abs(expected_hit_rate(m, 32, 0.7, even) - (0.7 + 0.97 * 0.5) / 2) < 1e-3);
}

TEST(speed_follows_what_it_is_made_of) {
  const ModelSpec m = mixture();
  const Rates fast = rates();
  Rates slow_disk = fast;
  slow_disk.read_each_s *= 2;
  const auto speed = [&](uint32_t slots, const Rates& r, double hit) {
    return predict_speed(m, plan_of(slots), r, rehearsal(hit), {});
  };
  CHECK(speed(16, fast, 0.6).decode_tok_s > speed(16, fast, 0.3).decode_tok_s);
  CHECK(speed(16, fast, 0.3).decode_tok_s > 1.3 * speed(16, slow_disk, 0.3).decode_tok_s);
  CHECK(speed(16, fast, 0.3).prefill_tok_s > speed(16, slow_disk, 0.3).prefill_tok_s);
  CHECK(speed(48, fast, 0.9).prefill_tok_s > speed(16, fast, 0.9).prefill_tok_s);
  // Where all is resident the disk is not in it.
  CHECK_EQ(speed(64, fast, 1).decode_tok_s, speed(64, slow_disk, 1).decode_tok_s);
  CHECK_EQ(speed(64, fast, 1).decode_tok_s, 1 / 5e-3);
  CHECK_EQ(speed(64, slow_disk, 1).prefill_tok_s, kPromptTokens / 0.1);
  const Speed s = speed(16, fast, 0.3);
  CHECK(s.decode_low_tok_s >= 0.799 * s.decode_tok_s && s.decode_high_tok_s <= 1.201 * s.decode_tok_s);
  CHECK(!s.from_history && predict_speed(m, plan_of(16), fast, rehearsal(), std::vector<float>(64, 1.0f)).from_history);
}

// By hand: two layers, every expert a miss, so that all of the guesses but a tenth are right.
TEST(speed_of_a_token_by_hand) {
  const double layer = 2 * (1e-3 + 4.5e-6) + 1e-4 + 0.1 * 1e-3 - 2e-4;
  CHECK(std::abs(predict_speed(mixture(2), plan_of(4), rates(), rehearsal(0), {}).decode_tok_s * (5e-3 + 2 * layer) -
                 1) < 1e-9);
}

// A dense model asks for nothing.
TEST(speed_without_experts) {
  ModelSpec m = mixture();
  for (LayerSpec& layer : m.layers) layer.ffn = {};
  Plan plan;
  plan.chunk = 512;
  const Speed s = predict_speed(m, plan, rates(), rehearsal(1), {});
  CHECK_EQ(s.decode_tok_s, 1 / 5e-3);
  CHECK_EQ(s.prefill_tok_s, kPromptTokens / 0.1);
  CHECK_EQ(s.hit_rate, 1.0);
}
