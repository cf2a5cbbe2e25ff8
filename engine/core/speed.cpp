#include "core/speed.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace smoe {
namespace {

constexpr double kBand = 0.2;          // either way
constexpr double kHistoryTokens = 32;  // counted before history and rehearsal weigh the same
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

// How often each rank of a layer's experts is used by a token, most used first: what was counted, drawn to the line as
// long as few tokens were. Of the line, the most used share x of the experts has 1 - (1 - x)^locality of the uses.
std::vector<double> popularity(const FfnSpec& ffn, double locality, const float* counts) {
  std::vector<double> by_rank(ffn.experts);
  double all = 0, before = 0;
  for (uint32_t e = 0; e < ffn.experts; ++e) all += by_rank[e] = counts[e];
  std::sort(by_rank.begin(), by_rank.end(), std::greater<>());
  const double tokens = all / ffn.top_k, weight = tokens / (tokens + kHistoryTokens);
  for (uint32_t e = 0; e < ffn.experts; ++e) {
    const double held = 1 - std::pow(1 - (e + 1.0) / ffn.experts, locality), line = held - before;
    before = held;
    by_rank[e] = ffn.top_k * (weight * (all > 0 ? by_rank[e] / all : 0) + (1 - weight) * line);
  }
  return by_rank;
}

}  // namespace

double expected_hit_rate(const ModelSpec& model, uint32_t slots, double rehearsed, const std::vector<float>& history) {
  if (history.empty() || slots >= history.size()) return rehearsed;
  const double part = static_cast<double>(slots) / static_cast<double>(history.size());
  const double locality = std::log(std::max(1e-3, 1 - rehearsed)) / std::log(1 - part);
  std::vector<double> all;
  for (const LayerSpec& layer : model.layers) {
    if (!layer.ffn.is_moe()) continue;
    const std::vector<double> of_layer = popularity(layer.ffn, locality, history.data() + all.size());
    all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  const double asked = std::accumulate(all.begin(), all.end(), 0.0);
  std::nth_element(all.begin(), all.begin() + slots, all.end(), std::greater<>());
  return kFound * std::accumulate(all.begin(), all.begin() + slots, 0.0) / asked;
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
