#include "core/sampler.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <limits>

namespace smoe {
namespace {

constexpr float kOut = -std::numeric_limits<float>::infinity();

// Values that are looked at together: nearly all of a vocabulary are below an edge, which is found out for many at
// once.
constexpr uint32_t kTogether = 64;

// f(id) for every id in [from, n), in order, whose value is above edge() just then, or with `equal` at it.
template <bool equal = false, class Edge, class F>
void for_each_above(const float* values, uint32_t from, uint32_t n, const Edge& edge, const F& f) {
  const auto above = [&](uint32_t id, float than) { return equal ? values[id] >= than : values[id] > than; };
  for (uint32_t id = from; id < n;) {
    const uint32_t end = std::min(n, id + kTogether);
    const float than = edge();
    uint32_t found = 0;
    if (end - id == kTogether) {
      for (uint32_t i = 0; i < kTogether; ++i) found += above(id + i, than);
    } else {
      found = 1;
    }
    for (; found != 0 && id < end; ++id)
      if (above(id, edge())) f(id);
    id = end;
  }
}

bool allowed(const uint8_t* mask, uint32_t id) { return !mask || (mask[id >> 3] >> (id & 7) & 1); }

// An adjusted logit stays finite, so that -inf only ever means "left out".
float finite(float x) { return std::clamp(x, -FLT_MAX, FLT_MAX); }

uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64 (Steele, Lea, Flood 2014)
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

bool in_range(const Sampling& s) {
  return std::isfinite(s.temperature) && s.temperature >= 0 && s.top_p >= 0 && s.top_p <= 1 && s.min_p >= 0 &&
         s.min_p <= 1 && std::isfinite(s.repetition_penalty) && s.repetition_penalty > 0 &&
         std::isfinite(s.frequency_penalty) && std::isfinite(s.presence_penalty);
}

}  // namespace

double uniform(uint64_t seed, uint64_t position) {
  constexpr uint64_t golden = 0x9e3779b97f4a7c15ull;
  return static_cast<double>(mix(mix(seed + golden) + golden * (position + 1)) >> 11) * 0x1p-53;
}

uint64_t Sampler::bytes(uint32_t vocab) {
  return uint64_t{vocab} * (sizeof(float) + sizeof(Candidate) + sizeof(uint32_t)) + kMaxTopK * sizeof(float);
}

Sampler::Sampler(uint32_t vocab) : vocab_(vocab), given_(vocab), counts_(vocab) {
  candidates_.reserve(vocab);
  heap_.reserve(kMaxTopK);
}

Status Sampler::begin(const Request& request, const std::vector<int32_t>& exempt) {
  const auto outside = [&](int32_t id) { return id < 0 || static_cast<uint32_t>(id) >= vocab_; };
  if (!in_range(request.sampling)) return {Code::usage, "bad_request", "a sampling parameter is outside its range"};
  for (const auto& [id, value] : request.bias) {
    if (outside(id) || !std::isfinite(value)) {
      return {Code::usage, "bad_request", "a bias names an id outside the vocabulary or a value that is not finite"};
    }
  }
  sampling_ = request.sampling;
  sampling_.top_k = std::min(sampling_.top_k, kMaxTopK);
  bias_ = request.bias;
  exempt_ = exempt;
  std::sort(exempt_.begin(), exempt_.end());
  logprobs_ = std::min(request.logprobs, vocab_);
  report_logprobs_ = request.report_logprobs;
  saw_non_finite_ = warned_ = false;
  std::fill(counts_.begin(), counts_.end(), 0u);
  return Status::ok();
}

const char* Sampler::take_warning() {
  if (!saw_non_finite_ || warned_) return nullptr;
  warned_ = true;
  return "the model produced logits that are not finite; they were masked";
}

// Distinct ids of the window, each once, as the reference's gather and scatter do; the counts of generated ids are
// linear.
void Sampler::penalize(std::span<const int32_t> history) {
  if (sampling_.repetition_penalty != 1.0f) {
    std::array<int32_t, kPenaltyWindow> window;
    const size_t n = std::min<size_t>(history.size(), kPenaltyWindow);
    std::copy(history.end() - static_cast<std::ptrdiff_t>(n), history.end(), window.begin());
    std::sort(window.begin(), window.begin() + n);
    for (size_t i = 0; i < n; ++i) {
      const int32_t id = window[i];
      if ((i && id == window[i - 1]) || id < 0 || static_cast<uint32_t>(id) >= vocab_ || work_[id] == kOut) continue;
      if (std::binary_search(exempt_.begin(), exempt_.end(), id)) continue;
      const float x = work_[id];
      work_[id] = finite(x < 0 ? x * sampling_.repetition_penalty : x / sampling_.repetition_penalty);
    }
  }
  if (sampling_.frequency_penalty == 0 && sampling_.presence_penalty == 0) return;
  for (uint32_t id = 0; id < vocab_; ++id) {
    if (!counts_[id] || work_[id] == kOut) continue;
    const float penalty = static_cast<float>(counts_[id]) * sampling_.frequency_penalty + sampling_.presence_penalty;
    work_[id] = finite(work_[id] - finite(penalty));
  }
}

Status Sampler::prepare(float* logits, std::span<const int32_t> history, const uint8_t* mask) {
  work_ = logits;
  uint32_t good_ids = 0, left_ids = 0;
  for (uint32_t id = 0; id < vocab_; ++id) good_ids += std::abs(work_[id]) <= FLT_MAX;
  for (uint32_t id = 0; good_ids < vocab_ && id < vocab_; ++id)
    if (!(std::abs(work_[id]) <= FLT_MAX)) work_[id] = kOut;
  left_ids = good_ids;
  for (uint32_t id = 0; mask != nullptr && id < vocab_; ++id) {
    if (allowed(mask, id)) continue;
    left_ids -= work_[id] != kOut;
    work_[id] = kOut;
  }
  saw_non_finite_ |= good_ids < vocab_;
  if (!good_ids)
    return {Code::failed, "non_finite", "every logit is NaN or infinite: the vault or the engine is at fault"};
  if (!left_ids) {
    for (uint32_t id = 0; id < vocab_; ++id) {
      if (allowed(mask, id)) return {Code::failed, "non_finite", "no token that the mask allows has a finite logit"};
    }
    return {Code::usage, "bad_request", "the mask allows no token"};
  }
  penalize(history);
  for (const auto& [id, value] : bias_) {
    if (work_[id] != kOut) work_[id] = finite(work_[id] + value);
  }
  return Status::ok();
}

// The first of equals.
int32_t Sampler::argmax() const {
  uint32_t best = 0;
  for_each_above(work_, 1, vocab_, [&] { return work_[best]; }, [&](uint32_t id) { best = id; });
  return static_cast<int32_t>(best);
}

// candidates_ = the values not below the k-th largest (ties at the edge stay, as in the reference), in id order; k = 0:
// all. A heap of the k best so far gives the edge: one comparison for nearly every value of a large vocabulary.
void Sampler::collect_top(const float* values, uint32_t k) {
  candidates_.clear();
  heap_.clear();
  if (k == 0 || k >= vocab_) {
    for (uint32_t id = 0; id < vocab_; ++id) add_candidate(values, id);
    return;
  }
  heap_.assign(values, values + k);
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  for (uint32_t id = 0; id < k; ++id) add_candidate(values, id);
  for_each_above<true>(
      values, k, vocab_, [&] { return heap_.front(); },
      [&](uint32_t id) {
        add_candidate(values, id);
        if (values[id] == heap_.front()) return;
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
        heap_.back() = values[id];
        std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
      });
  std::erase_if(candidates_, [&](const Candidate& c) { return c.value < heap_.front(); });
}

void Sampler::add_candidate(const float* values, uint32_t id) {
  if (values[id] != kOut) candidates_.push_back({values[id], static_cast<int32_t>(id)});
}

// Keeps the most likely candidates whose predecessors sum to less than top_p. Sorts only as far as that takes.
void Sampler::keep_nucleus(double total) {
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
  };
  const double goal = double{sampling_.top_p} * total;
  double sum = 0;
  size_t kept = 0;
  for (size_t sorted = 0, step = 256; kept < candidates_.size(); step *= 8) {
    const size_t end = std::min(candidates_.size(), sorted + step);
    const auto first = candidates_.begin() + sorted, last = candidates_.begin() + end;
    if (!sorted) {
      std::partial_sort(first, last, candidates_.end(), better);  // a heap: one comparison for most, and mostly enough
    } else {
      std::nth_element(first, last, candidates_.end(), better);
      std::sort(first, last, better);
    }
    for (sorted = end; kept < end; ++kept) {
      if (kept && sum >= goal) return candidates_.resize(kept);
      sum += candidates_[kept].value;
    }
  }
}

double Sampler::select() {
  collect_top(work_, sampling_.top_k);
  double max = -DBL_MAX, total = 0;
  for (const Candidate& c : candidates_) max = std::max(max, double{c.value});
  for (Candidate& c : candidates_) {
    c.value = static_cast<float>(std::exp((c.value - max) / sampling_.temperature));
    total += c.value;
  }
  // min-p compares with the best, which top-p always keeps: taken first, it leaves less to sort and the same set.
  if (sampling_.min_p > 0) std::erase_if(candidates_, [&](const Candidate& c) { return c.value < sampling_.min_p; });
  if (sampling_.top_p < 1) keep_nucleus(total);
  double sum = 0;
  for (const Candidate& c : candidates_) sum += c.value;
  return sum;
}

Status Sampler::sample(float* logits, std::span<const int32_t> history, uint64_t position, const uint8_t* mask,
                       TokenEvent* out) {
  if (report_logprobs_) std::copy_n(logits, vocab_, given_.begin());
  SMOE_TRY(prepare(logits, history, mask));
  if (sampling_.temperature < kGreedyBelow) {
    out->id = argmax();
  } else {
    const double goal = uniform(sampling_.seed, position) * select();
    double sum = 0;
    out->id = candidates_.front().id;
    for (const Candidate& c : candidates_) {
      if (c.value > 0) out->id = c.id;  // rounding may leave the goal at the very end: the last possible one it is
      if ((sum += c.value) > goal) break;
    }
  }
  ++counts_[out->id];
  if (report_logprobs_) report(out);
  return Status::ok();
}

// Log-probabilities of the distribution as the model gave it, whatever was done to it for the draw.
void Sampler::report(TokenEvent* out) {
  double max = -DBL_MAX, total = 0;
  for (float& value : given_) {
    if (!std::isfinite(value)) value = kOut;
    max = std::max(max, double{value});
  }
  for (const float value : given_) total += std::exp(value - max);
  const double log_total = max + std::log(total);
  out->logprob = static_cast<float>(given_[out->id] - log_total);
  out->top.clear();
  if (!logprobs_) return;
  collect_top(given_.data(), std::min(logprobs_, kMaxTopK));
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
  });
  if (candidates_.size() > logprobs_) candidates_.resize(logprobs_);
  for (const Candidate& c : candidates_) out->top.emplace_back(c.id, static_cast<float>(c.value - log_total));
}

Status Sampler::probabilities(float* logits, std::span<const int32_t> history, const uint8_t* mask, double* out) {
  SMOE_TRY(prepare(logits, history, mask));
  std::fill(out, out + vocab_, 0.0);
  if (sampling_.temperature < kGreedyBelow) {
    out[argmax()] = 1;
    return Status::ok();
  }
  const double total = select();
  for (const Candidate& c : candidates_) out[c.id] = c.value / total;
  return Status::ok();
}

}  // namespace smoe
