// An engine without a model, for the protocol's tests and fuzzer. After a prompt ending in id x it says x + 1, x + 2,
// ... modulo the vocabulary; ids below kEos are ordinary, kEos ends a reply. Prompts that start with kIoError ... fail
// in that way.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "smoe/engine.h"

namespace smoe {

class FakeEngine final : public Engine {
 public:
  static constexpr uint32_t kVocab = 100;
  static constexpr int32_t kEos = 99, kIoError = 90, kNonFinite = 91, kNoMemory = 92, kThrows = 93, kWarns = 94,
                           kOdd = 95;
  static constexpr uint32_t kCtx = 1000, kChunk = 4;

  FakeEngine() {
    model_.vocab = kVocab;
    model_.eos_ids = {kEos};
    plan_.ctx = kCtx;
  }

  const ModelSpec& model() const override { return model_; }
  const Plan& plan() const override { return plan_; }
  std::string info_json() const override { return R"({"model": "fake", "ctx": 1000})"; }
  void reset() override { held_.clear(); }
  Buckets buckets() const override { return {}; }
  std::vector<int32_t> route_trace() const override { return {}; }
  Result<std::vector<float>> logits(const std::vector<int32_t>&, size_t) override { return std::vector<float>{}; }

  bool room_for(const std::string&) const override { return true; }
  Status start(const Request&, Events&) override { return {Code::failed, "one at a time"}; }
  bool step(std::vector<Ended>*) override { return false; }

  Result<Outcome> generate(const Request& r, Events& events) override {
    last_ = r;
    if (!r.slide && r.ids.size() > kCtx) return Status{Code::usage, "ctx_overflow"};
    Outcome o;
    o.counters.prompt_tokens = static_cast<uint32_t>(r.ids.size());
    o.counters.cached_tokens = static_cast<uint32_t>(
        std::mismatch(held_.begin(), held_.end(), r.ids.begin(), r.ids.end()).first - held_.begin());
    o.counters.cached_tokens = std::min(o.counters.cached_tokens, o.counters.prompt_tokens - 1);
    events.on_begin(o.counters.prompt_tokens, o.counters.cached_tokens);
    if (!prefill(o.counters, events)) return finish(o, Finish::cancel);
    if (Status s = failure(r.ids.front(), events); !s.is_ok()) return s;
    held_ = r.ids;
    std::vector<uint8_t> mask;
    for (int32_t id = r.ids.back();;) {
      wait_at_gate();
      if (events.cancelled() || (r.mask && events.next_mask(&mask) != MaskAnswer::ready))
        return finish(o, Finish::cancel);
      id = next(id, r.mask ? mask.data() : nullptr);
      if (id < 0) return Status{Code::usage, "bad_request", "the mask allows no token"};
      if (id == kEos || std::count(r.stop_ids.begin(), r.stop_ids.end(), id)) return finish(o, Finish::stop);
      TokenEvent token{id, -0.5f, {}};
      for (uint32_t i = 0; i < std::min(r.logprobs, kVocab); ++i)
        token.top.emplace_back(i, -1.0f - static_cast<float>(i));
      events.on_token(token);
      held_.push_back(id);
      if (++o.counters.generated_tokens == r.max_tokens) return finish(o, Finish::length);
    }
  }

  Result<std::vector<TokenEvent>> score(const std::vector<int32_t>& ids, uint32_t top, Events& events) override {
    if (events.cancelled()) return Status{Code::cancelled, "cancelled"};
    events.on_prefill(static_cast<uint32_t>(ids.size()), static_cast<uint32_t>(ids.size()));
    if (Status s = failure(ids.front(), events); !s.is_ok()) return s;
    TokenEvent token{0, -0.25f, {}};
    for (uint32_t i = 0; i < std::min(top, kVocab); ++i) token.top.emplace_back(i, -1.0f - static_cast<float>(i));
    return std::vector<TokenEvent>(ids.size() - 1, token);
  }

  // Each generated token waits for one permit, once a gate is set up.
  void close_gate() { gated_ = true; }
  void permit(int tokens) {
    std::lock_guard lock(mutex_);
    permits_ += tokens;
    changed_.notify_all();
  }
  const Request& last_request() const { return last_; }

 private:
  static Outcome finish(Outcome o, Finish f) {
    o.finish = f;
    return o;
  }
  bool prefill(const Counters& n, Events& events) {
    const uint32_t total = n.prompt_tokens - n.cached_tokens;
    for (uint32_t done = 0; done < total;) {
      if (events.cancelled()) return false;
      done = std::min(total, done + kChunk);
      events.on_prefill(done, total);
    }
    return true;
  }
  // The next id that the mask allows, round the vocabulary; -1 if there is none.
  static int32_t next(int32_t id, const uint8_t* mask) {
    for (uint32_t step = 0; step < kVocab; ++step) {
      id = (id + 1) % static_cast<int32_t>(kVocab);
      if (!mask || (mask[id / 8] >> (id % 8) & 1)) return id;
    }
    return -1;
  }
  static Status failure(int32_t id, Events& events) {
    if (id == kIoError) return {Code::io, "io_error: read of layer 3, expert 7 failed"};
    if (id == kNonFinite) return {Code::failed, "non_finite"};
    if (id == kNoMemory) return {Code::resources, "no_memory"};
    if (id == kThrows) throw std::bad_alloc();
    if (id == kOdd) return {Code::failed, "something else"};
    if (id == kWarns) events.on_warning("odd logits");
    return Status::ok();
  }
  void wait_at_gate() {
    if (!gated_) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return permits_ > 0; });
    --permits_;
  }

  ModelSpec model_;
  Plan plan_;
  std::vector<int32_t> held_;
  Request last_;
  bool gated_ = false;
  int permits_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace smoe
