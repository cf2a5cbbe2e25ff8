#include "core/speed.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "quant/quant.h"

namespace smoe {
namespace {

constexpr double kBand = 0.2;          // either way
constexpr double kHistoryTokens = 32;  // counted before history and the line weigh the same
constexpr double kLoopsALayer = 14;    // parallel loops of a layer for one token
constexpr double kLocality = 1.5;      // see expected_hit_rate()
// Measured on the machine of tests/bench_data/2026-11-30-plan: the share of a token's time that is left when the next
// layer's likeliest experts are read on a guess; how many times longer a record that has just been read takes through
// memory; what a cache finds of what the most used records would give; what a value that is only moved costs beside one
// that is read in a row; how much of the shorter of reading and computing a prompt is not hidden behind the other.
constexpr double kGuessed = 0.92, kFresh = 3, kFound = 0.97, kMovedShare = 7, kNotHidden = 0.42;

struct Bytes {
  std::map<Encoding, double> of;
  void add(Encoding e, double bytes) { of[e] += bytes; }
  // Seconds to go through them at `rates`.
  double time(const std::map<Encoding, double>& rates) const {
    double seconds = 0;
    for (const auto& [encoding, bytes] : of) seconds += bytes / rates.at(encoding);
    return seconds;
  }
};

double matrix_bytes(Encoding e, uint64_t rows, uint64_t cols) { return static_cast<double>(rows * row_bytes(e, cols)); }

Bytes expert_bytes(const FfnSpec& ffn, uint32_t hidden) {
  Bytes b;
  b.add(ffn.encodings.gate, matrix_bytes(ffn.encodings.gate, ffn.expert_width, hidden));
  b.add(ffn.encodings.up, matrix_bytes(ffn.encodings.up, ffn.expert_width, hidden));
  b.add(ffn.encodings.down, matrix_bytes(ffn.encodings.down, hidden, ffn.expert_width));
  return b;
}

// What each token goes through besides routed experts. Of an untied embedding one row is read: nothing.
Bytes trunk_bytes(const ModelSpec& model, bool with_head) {
  Bytes b;
  const std::string head = model.tied_head ? "embed.weight" : "head.weight";
  for (const auto& [name, t] : model.tensors) {
    if (t.rows <= 1 || name == "embed.weight" || name == head) continue;
    b.add(t.encoding, matrix_bytes(t.encoding, t.rows, t.cols));
  }
  const auto found = model.tensors.find(head);
  if (with_head && found != model.tensors.end()) {
    b.add(found->second.encoding, matrix_bytes(found->second.encoding, found->second.rows, found->second.cols));
  }
  return b;
}

// The reads of a layer and its products one after the other: what was measured on the machines seen so far, whatever
// was computed while reads ran (LEARNED.md, 2026-11-30-reads-and-products).
double layer_seconds(const FfnSpec& ffn, uint32_t hidden, double hit, const Rates& r) {
  const double asked = 1 - std::pow(hit, ffn.top_k);  // the chance that there is anything to read
  const double misses = ffn.top_k * (1 - hit), record = record_layout(ffn, hidden).length;
  return ffn.top_k * expert_bytes(ffn, hidden).time(r.decode_bytes_s) + asked * r.read_first_s +
         misses * (r.read_each_s + kFresh * record / r.memory_bytes_s);
}

double decode_seconds(const ModelSpec& model, double hit, const Rates& r) {
  double seconds = trunk_bytes(model, true).time(r.decode_bytes_s);
  for (const LayerSpec& layer : model.layers) {
    seconds += kLoopsALayer * r.hand_out_s;
    if (layer.ffn.is_moe()) seconds += layer_seconds(layer.ffn, model.hidden, hit, r);
  }
  return seconds;
}

// One chunk of a prompt. Of the last layer no more than one row goes beyond its keys and values.
double chunk_seconds(const ModelSpec& model, double resident, double tokens, const Rates& r) {
  double compute = tokens * trunk_bytes(model, false).time(r.prefill_bytes_s), read = 0, moved = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const AttentionSpec& a = model.layers[i].attention;
    const FfnSpec& ffn = model.layers[i].ffn;
    const double rows = i + 1 < model.layers.size() ? tokens : 1;
    moved += tokens * (10 * model.hidden + 4 * a.heads * a.head_dim + 4 * model.layers[i].recurrent.values());
    if (!ffn.is_moe()) continue;
    moved += rows * ffn.top_k * 3 * (ffn.expert_width + model.hidden);
    compute += rows * ffn.top_k * expert_bytes(ffn, model.hidden).time(r.prefill_bytes_s);
    const double used = ffn.experts * (1 - std::pow(1 - double(ffn.top_k) / ffn.experts, rows));
    read += used * (1 - resident) * r.read_each_s;
  }
  compute += moved * sizeof(float) * kMovedShare / r.memory_bytes_s;
  return std::max(compute, read) + kNotHidden * std::min(compute, read);
}

// How often each rank of a layer's experts is used by a token, most used first: what was counted, drawn to the line as
// long as few tokens were.
std::vector<double> popularity(const FfnSpec& ffn, const float* counts) {
  std::vector<double> by_rank(ffn.experts);
  double all = 0, before = 0;
  for (uint32_t e = 0; counts != nullptr && e < ffn.experts; ++e) all += by_rank[e] = counts[e];
  std::sort(by_rank.begin(), by_rank.end(), std::greater<>());
  const double tokens = all / ffn.top_k, weight = all > 0 ? tokens / (tokens + kHistoryTokens) : 0;
  for (uint32_t e = 0; e < ffn.experts; ++e) {
    const double held = 1 - std::pow(1 - (e + 1.0) / ffn.experts, kLocality), line = held - before;
    before = held;
    by_rank[e] = ffn.top_k * (weight * (all > 0 ? by_rank[e] / all : 0) + (1 - weight) * line);
  }
  return by_rank;
}

}  // namespace

double expected_hit_rate(const ModelSpec& model, uint32_t slots, const std::vector<float>& history) {
  std::vector<double> all;
  for (const LayerSpec& layer : model.layers) {
    if (!layer.ffn.is_moe()) continue;
    const bool counted = all.size() + layer.ffn.experts <= history.size();
    const std::vector<double> of_layer = popularity(layer.ffn, counted ? history.data() + all.size() : nullptr);
    all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  if (slots >= all.size()) return 1;
  const double asked = std::accumulate(all.begin(), all.end(), 0.0);
  std::nth_element(all.begin(), all.begin() + slots, all.end(), std::greater<>());
  const double held = std::accumulate(all.begin(), all.begin() + slots, 0.0) / asked;
  return history.empty() ? held : kFound * held;
}

Speed predict_speed(const ModelSpec& model, const Plan& plan, const Rates& rates, const std::vector<float>& history) {
  Speed s;
  s.hit_rate = expected_hit_rate(model, plan.slots, history);
  s.from_history = !history.empty();
  const double streamed = s.hit_rate < 1 ? kGuessed : 1;
  s.decode_tok_s = 1 / (streamed * decode_seconds(model, s.hit_rate, rates));
  s.decode_low_tok_s = s.decode_tok_s * (1 - kBand);
  s.decode_high_tok_s = s.decode_tok_s * (1 + kBand);
  const double held = plan.cache_slots - plan.chunk_slots;
  const double resident = plan.total_records == 0 ? 1 : std::min(1.0, held / plan.total_records);
  double seconds = trunk_bytes(model, true).time(rates.decode_bytes_s);  // the head runs once
  for (uint32_t done = 0; done < kPromptTokens; done += plan.chunk) {
    seconds += chunk_seconds(model, resident, std::min(plan.chunk, kPromptTokens - done), rates);
  }
  s.prefill_tok_s = kPromptTokens / seconds;
  return s;
}

}  // namespace smoe
