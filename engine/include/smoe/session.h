// One conversation: requests, sampling parameters, outcomes. The caller sends the whole conversation's ids every time;
// the session keeps the keys and values of the longest common prefix and computes the rest. Warm output equals cold
// output.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "smoe/events.h"
#include "smoe/status.h"

namespace smoe {

struct Sampling {
  float temperature = 0.6f;         // below 1e-4: greedy argmax
  float top_p = 0.95f;              // 1 = off
  uint32_t top_k = 50;              // 0 = off; capped at 1024
  float min_p = 0.0f;               // 0 = off
  float repetition_penalty = 1.1f;  // 1 = off; over the last 256 tokens
  float frequency_penalty = 0.0f, presence_penalty = 0.0f;
  uint64_t seed = 1337;
};

struct Request {
  std::vector<int32_t> ids;
  uint32_t max_tokens = 0;
  Sampling sampling;
  std::vector<int32_t> stop_ids;                // besides the vault's EOS ids
  std::vector<std::pair<int32_t, float>> bias;  // added to the logits
  std::string session;                          // resident conversation; "" = the default one
  uint32_t logprobs = 0;                        // how many alternatives to report; 0 = none
  bool report_logprobs = false;
  bool slide = true;  // false: a prompt over the window is ctx_overflow
  bool mask = false;  // constrained decoding through Events::next_mask
  bool report_buckets = false;
};

enum class Finish { stop, length, cancel };

// Counters of one request. Times in milliseconds, sizes in bytes.
struct Counters {
  uint32_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;
  uint32_t drafted_tokens = 0, accepted_tokens = 0;  // guesses computed, and those that came true
  double prefill_ms = 0, decode_ms = 0, wait_ms = 0;
  uint64_t hits = 0, misses = 0, read_bytes = 0;
  uint64_t guessed = 0, guessed_right = 0;  // records read ahead on a guess, and those that were then asked for
};

// Where a request's time went, milliseconds; together prefill_ms + decode_ms. What waits for experts' reads while
// nothing is ready to be computed is expert_wait; `other` is norms, embedding, and telling the caller.
struct Buckets {
  double attention = 0, router = 0, expert_compute = 0, expert_wait = 0, head = 0, sampler = 0, other = 0;
};

struct Outcome {
  Finish finish = Finish::stop;
  Counters counters;
  std::optional<Buckets> buckets;  // with Request::report_buckets
};

}  // namespace smoe
