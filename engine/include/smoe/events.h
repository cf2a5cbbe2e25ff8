// What a running request tells its caller, and what the caller may answer. Called on the engine's own thread.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace smoe {

struct TokenEvent {
  int32_t id = 0;
  float logprob = 0;                           // natural log, of the unmodified distribution; only with logprobs
  std::vector<std::pair<int32_t, float>> top;  // the `logprobs` most likely, best first
};

enum class MaskAnswer { ready, pending, cancel };

class Events {
 public:
  virtual ~Events() = default;
  virtual void on_begin(uint32_t /*prompt_tokens*/, uint32_t /*cached_tokens*/) {}
  virtual void on_prefill(uint32_t /*done*/, uint32_t /*total*/) {}
  virtual void on_token(const TokenEvent&) {}
  virtual void on_warning(const char* /*text*/) {}
  // Polled before each token and each prefill chunk; true ends the request with fin = cancel.
  virtual bool cancelled() { return false; }
  // Asked before each sampled token when Request::mask is set: one bit per vocabulary id, LSB first. With `pending` it
  // is asked again later, and what runs beside this request goes on meanwhile.
  virtual MaskAnswer next_mask(std::vector<uint8_t>* /*bits*/) { return MaskAnswer::cancel; }
  // Nothing can be done before a mask has come: waits until next_mask() or cancelled() may answer otherwise.
  virtual void wait() {}
};

}  // namespace smoe
