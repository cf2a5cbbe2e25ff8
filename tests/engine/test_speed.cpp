#include <algorithm>

#include "check.h"
#include "core/speed.h"

using namespace smoe;

namespace {

// `layers` mixtures of 16 experts, top-2, and a head; rates such that times can be told apart.
ModelSpec mixture(uint32_t layers = 4) {
  ModelSpec m;
  m.hidden = 256;
  m.vocab = 1000;
  m.tensors["head.weight"] = {Encoding::q8_0, Layout::panel16, 1024, 256, 0};
  for (uint32_t i = 0; i < layers; ++i) {
    LayerSpec layer;
    layer.attention.heads = 4;
    layer.attention.head_dim = 64;
    layer.ffn.experts = 16;
    layer.ffn.top_k = 2;
    layer.ffn.expert_width = 256;
    layer.ffn.encodings = {Encoding::q4_0, Encoding::q4_0, Encoding::q4_0};
    m.layers.push_back(layer);
  }
  return m;
}

Rates rates() {
  Rates r;
  r.memory_bytes_s = 50e9;
  r.read_first_s = 1e-4;
  r.read_each_s = 1e-3;
  for (Encoding e : {Encoding::q8_0, Encoding::q4_0}) r.decode_bytes_s[e] = 40e9, r.prefill_bytes_s[e] = 800e9;
  r.hand_out_s = 1e-6;
  return r;
}

Plan plan_of(uint32_t slots) {
  Plan p;
  p.slots = slots;
  p.total_records = 64;
  p.chunk = 512;
  return p;
}

}  // namespace

TEST(speed_hit_rate_without_history) {
  const ModelSpec m = mixture();
  CHECK_EQ(expected_hit_rate(m, 64, {}), 1.0);
  double last = 0;
  for (uint32_t slots = 4; slots < 64; slots += 4) {
    const double hit = expected_hit_rate(m, slots, {});
    CHECK(hit > slots / 64.0 && hit < 1 - (1 - slots / 64.0) * (1 - slots / 64.0));  // between even and real text
    CHECK(hit > last);
    last = hit;
  }
}

TEST(speed_hit_rate_with_history) {
  const ModelSpec m = mixture();
  std::vector<float> even(64, 1e6f), skewed(64, 1.0f), little(64, 0.0f);
  for (uint32_t layer = 0; layer < 4; ++layer) skewed[layer * 16 + 3] = skewed[layer * 16 + 7] = 1e6f;
  little[0] = 1;
  CHECK(std::abs(expected_hit_rate(m, 32, even) - 0.5) < 0.03);
  CHECK(expected_hit_rate(m, 8, skewed) > 0.9);
  CHECK(std::abs(expected_hit_rate(m, 32, little) - expected_hit_rate(m, 32, {})) < 0.05);  // one token says little
  // A layer that was counted a thousand times less, as the last one is in prompts, is not less used.
  for (uint32_t e = 0; e < 16; ++e) skewed[48 + e] *= 1e-3f;
  CHECK(expected_hit_rate(m, 8, skewed) > 0.85);
}

TEST(speed_follows_what_it_is_made_of) {
  const ModelSpec m = mixture();
  const Rates fast = rates();
  Rates slow_disk = fast, slow_memory = fast;
  slow_disk.read_each_s *= 2;
  for (auto* table : {&slow_memory.decode_bytes_s, &slow_memory.prefill_bytes_s})
    for (auto& [encoding, rate] : *table) rate /= 2;
  const auto speed = [&](uint32_t slots, const Rates& r) { return predict_speed(m, plan_of(slots), r, {}); };
  CHECK(speed(32, fast).decode_tok_s > speed(16, fast).decode_tok_s);
  CHECK(speed(16, fast).decode_tok_s > 1.5 * speed(16, slow_disk).decode_tok_s);
  CHECK_EQ(speed(64, fast).decode_tok_s, speed(64, slow_disk).decode_tok_s);  // all resident: no disk in it
  CHECK(speed(64, fast).decode_tok_s > 1.2 * speed(64, slow_memory).decode_tok_s);
  CHECK(speed(16, fast).prefill_tok_s > speed(16, slow_disk).prefill_tok_s);
  CHECK(speed(64, fast).prefill_tok_s > speed(64, slow_memory).prefill_tok_s);
  const Speed s = speed(16, fast);
  CHECK(s.decode_low_tok_s >= 0.799 * s.decode_tok_s && s.decode_high_tok_s <= 1.201 * s.decode_tok_s);
  CHECK(!s.from_history && predict_speed(m, plan_of(16), fast, std::vector<float>(64, 1.0f)).from_history);
}

// By hand: two layers, every expert a miss.
TEST(speed_of_a_token_by_hand) {
  const ModelSpec m = mixture(2);
  Plan plan = plan_of(0);
  plan.total_records = 32;
  const double expert = 3 * 256 * 256 / 32 * 18 / 40e9, head = 1024 * 256 / 32 * 34 / 40e9;
  const double record = record_layout(m.layers[0].ffn, m.hidden).length;
  const double layer = 14e-6 + 2 * expert + 1e-4 + 2 * (1e-3 + 3 * record / 50e9);
  CHECK(std::abs(predict_speed(m, plan, rates(), {}).decode_tok_s * 0.92 * (head + 2 * layer) - 1) < 1e-9);
}
