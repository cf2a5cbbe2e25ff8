// From logits to a token. The order is that of the reference implementation (transformers): repetition penalty over the
// last 256 tokens, frequency and presence penalties, bias, then temperature, top-k, top-p, min-p, then one draw.
//
// The draw is a function of (seed, position in the conversation) alone: a request gives the same tokens whatever ran
// before or beside it, and a stream that is cut and resumed with its own tokens goes on as if it had not been.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "smoe/session.h"
#include "smoe/status.h"

namespace smoe {

class Sampler {
 public:
  static constexpr uint32_t kPenaltyWindow = 256;
  static constexpr uint32_t kMaxTopK = 1024;
  static constexpr float kGreedyBelow = 1e-4f;

  // What a sampler of this vocabulary allocates, all of it in the constructor: for the memory plan.
  static uint64_t bytes(uint32_t vocab);
  explicit Sampler(uint32_t vocab);

  // Starts a request: takes its sampling, bias and logprobs, forgets the counts of the one before. `exempt`: ids that
  // the repetition penalty leaves alone. Errors: Code::usage "bad_request" (a number outside its range, an id outside
  // the vocabulary).
  Status begin(const Request& request, const std::vector<int32_t>& exempt);

  // Picks the token that follows `history` (prompt and generated tokens, in order; at least the last 256 of them, with
  // `position` = the whole length). logits float32 [vocab], which change: what is adjusted is adjusted there; mask: one
  // bit per id, LSB first, ceil(vocab / 8) bytes, or null. Fills out->id, and logprob and top when the request asks for
  // them. The choice counts as generated. A logit that is not finite is left out of everything (see warning()). Errors:
  // Code::failed "non_finite" (no finite logit left), Code::usage "bad_request" (the mask allows nothing).
  Status sample(float* logits, std::span<const int32_t> history, uint64_t position, const uint8_t* mask,
                TokenEvent* out);

  // The distribution sample() would draw from, as probabilities double [vocab]; changes the logits, no state. For the
  // tests.
  Status probabilities(float* logits, std::span<const int32_t> history, const uint8_t* mask, double* out);

  // What there is to say once per request, or null: logits that were not finite were masked.
  const char* take_warning();

 private:
  struct Candidate {
    float value;  // the logit, then the weight exp((logit - max) / temperature)
    int32_t id;
  };

  Status prepare(float* logits, std::span<const int32_t> history, const uint8_t* mask);
  void penalize(std::span<const int32_t> history);
  int32_t argmax() const;
  double select();  // fills candidates_ with the weights that survive; returns their sum
  void keep_nucleus(double total);
  void collect_top(const float* values, uint32_t k);
  void add_candidate(const float* values, uint32_t id);
  void report(TokenEvent* out);

  const uint32_t vocab_;
  Sampling sampling_;
  std::vector<std::pair<int32_t, float>> bias_;
  std::vector<int32_t> exempt_;  // sorted
  uint32_t logprobs_ = 0;
  bool report_logprobs_ = false;
  bool saw_non_finite_ = false, warned_ = false;

  float* work_ = nullptr;              // [vocab] the caller's logits, adjusted; -inf = left out
  std::vector<float> given_;           // [vocab] as they were, where log-probabilities are asked for
  std::vector<Candidate> candidates_;  // capacity vocab
  std::vector<uint32_t> counts_;       // [vocab] how often generated in this request
  std::vector<float> heap_;            // capacity kMaxTopK
};

// A uniform number in [0, 1) from a seed and a position: the same on every platform.
double uniform(uint64_t seed, uint64_t position);

}  // namespace smoe
