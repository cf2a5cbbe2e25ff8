#include "core/speed.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace smoe {
namespace {

constexpr double kBand = 0.2;           // either way
constexpr double kHistoryTokens = 256;  // so many counted, and history has half of the weight that it can have
// Measured on the machine of tests/bench_data/2026-11-30-plan: what a cache finds of what the most used records would
// give; how many of the reads on a guess are in vain; the engine's own time for each read, in which it computes nothing
// (submitting it, choosing what gives way); how much of the shorter of reading and computing a prompt shows beside the
// longer, at most, and where guesses have room for a layer just once.
constexpr double kFound = 0.97, kInVain = 0.1, kHandledS = 4.5e-6, kMostShown = 0.45, kShown = 0.24;

// The reads of a layer of one token. The guess is read while attention is computed, as far as that lasts.
double layer_reads_s(const FfnSpec& ffn, double hit, double attention_s, const Rates& r) {
  const double asked = 1 - std::pow(hit, ffn.top_k);  // the chance that there is anything to read
  const double misses = ffn.top_k * (1 - hit);
  return misses * (r.read_each_s + kHandledS) +
         asked * (r.read_first_s + kInVain * r.read_each_s - std::min(r.read_each_s, attention_s));
}

double decode_seconds(const ModelSpec& model, double hit, const Rates& r, const Rehearsal& rehearsal) {
  double seconds = rehearsal.token_s;
  if (hit == 1) return seconds;
  for (const LayerSpec& layer : model.layers)
    if (layer.ffn.is_moe()) seconds += layer_reads_s(layer.ffn, hit, rehearsal.attention_s, r);
  return seconds;
}

double prompt_seconds(const ModelSpec& model, const Plan& plan, const Rates& r, const Rehearsal& rehearsal) {
  const double compute = rehearsal.prompt_s;
  if (plan.slots == plan.total_records) return compute;
  // Of the last layer only the last row is computed.
  const double layers = model.moe_layers(), asked = (layers - 1) * rehearsal.prompt_experts + model.max_top_k();
  // What stays from before: not the room of the layer that is computed and of the one that is read ahead.
  const double held = plan.cache_slots - plan.chunk_slots, of_layer = plan.total_records / layers;
  const double kept = std::max(0.0, held - 2 * of_layer) / plan.total_records;
  const double read = asked * (1 - kept) * r.read_each_s;
  const double room = held / 2 / of_layer;  // guesses may take half of the slots
  return std::max(compute, read) + std::min(kMostShown, kShown / room) * std::min(compute, read);
}

// What a cache finds that holds the most used records, each layer asking for top_k a token whatever was counted of it.
double found_of_counts(const ModelSpec& model, uint32_t slots, const std::vector<float>& counts) {
  std::vector<double> uses(counts.begin(), counts.end());  // by a token
  double asked = 0;
  auto at = uses.begin();
  for (const LayerSpec& layer : model.layers) {
    if (!layer.ffn.is_moe()) continue;
    const auto end = at + layer.ffn.experts;
    const double all = std::accumulate(at, end, 0.0);
    asked += layer.ffn.top_k;
    for (; at != end; ++at) *at = layer.ffn.top_k * (all > 0 ? *at / all : 1.0 / layer.ffn.experts);
  }
  std::nth_element(uses.begin(), uses.begin() + slots, uses.end(), std::greater<>());
  return kFound * std::accumulate(uses.begin(), uses.begin() + slots, 0.0) / asked;
}

}  // namespace

double expected_hit_rate(const ModelSpec& model, uint32_t slots, double rehearsed, const std::vector<float>& history) {
  if (history.empty() || slots >= history.size()) return rehearsed;
  double asked = 0;  // by a token
  for (const LayerSpec& layer : model.layers)
    if (layer.ffn.is_moe()) asked += layer.ffn.top_k;
  const double tokens = std::accumulate(history.begin(), history.end(), 0.0) / asked;
  const double weight = 0.5 * tokens / (tokens + kHistoryTokens);
  return (1 - weight) * rehearsed + weight * found_of_counts(model, slots, history);
}

Speed predict_speed(const ModelSpec& model, const Plan& plan, const Rates& rates, const Rehearsal& rehearsal,
                    const std::vector<float>& history) {
  Speed s;
  s.hit_rate = expected_hit_rate(model, plan.slots, rehearsal.hit_rate, history);
  s.from_history = !history.empty();
  s.decode_tok_s = 1 / decode_seconds(model, s.hit_rate, rates, rehearsal);
  s.decode_low_tok_s = s.decode_tok_s * (1 - kBand);
  s.decode_high_tok_s = s.decode_tok_s * (1 + kBand);
  s.prefill_tok_s = kPromptTokens / prompt_seconds(model, plan, rates, rehearsal);
  return s;
}

}  // namespace smoe
