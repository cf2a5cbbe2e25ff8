// An engine without a model, for the protocol's tests and fuzzer. After a prompt ending in id x it says x + 1, x + 2,
// ... modulo the vocabulary; ids below kEos are ordinary, kEos ends a reply. Prompts that start with kIoError ... fail
// in that way.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "smoe/engine.h"

namespace smoe {

class FakeEngine final : public Engine {
 public:
  static constexpr uint32_t kVocab = 100;
  static constexpr int32_t kEos = 99, kIoError = 90, kNonFinite = 91, kNoMemory = 92, kThrows = 93, kWarns = 94,
                           kOdd = 95;
  static constexpr uint32_t kCtx = 1000, kChunk = 4, kSessions = 3;

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

  bool room_for(const std::string& session) const override {
    return running_.size() < kSessions &&
           std::none_of(
               running_.begin(), running_.end(), [&](const Run& run) { return run.request.session == session; });
  }
  Status start(const Request& r, Events& events) override {
    last_ = r;
    if (!r.slide && r.ids.size() > kCtx) return {Code::usage, "ctx_overflow"};
    Run run{r, &events, {}, 0, r.ids.back()};
    const std::vector<int32_t>& held = held_[r.session];
    Counters& n = run.outcome.counters;
    n.prompt_tokens = static_cast<uint32_t>(r.ids.size());
    n.cached_tokens =
        static_cast<uint32_t>(std::mismatch(held.begin(), held.end(), r.ids.begin(), r.ids.end()).first - held.begin());
    n.cached_tokens = std::min(n.cached_tokens, n.prompt_tokens - 1);
    running_.push_back(run);
    events.on_begin(n.prompt_tokens, n.cached_tokens);
    return Status::ok();
  }
  // A chunk of the prompt, or a token, for each.
  bool step(std::vector<Ended>* ended) override {
    bool advanced = false;
    for (size_t i = 0; i < running_.size();) {
      std::optional<Result<Outcome>> end;
      try {
        end = advance(running_[i], &advanced);
      } catch (const std::bad_alloc&) {
        end = Status{Code::resources, "no_memory"};
      }
      if (end) {
        ended->push_back({running_[i].events, *end});
        running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    return advanced;
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
  struct Run {
    Request request;
    Events* events;
    Outcome outcome;
    uint32_t done;  // of the prompt
    int32_t id;     // the last one
  };

  static Outcome finish(Outcome o, Finish f) {
    o.finish = f;
    return o;
  }
  std::optional<Result<Outcome>> advance(Run& run, bool* advanced) {
    const Request& r = run.request;
    Counters& n = run.outcome.counters;
    const uint32_t total = n.prompt_tokens - n.cached_tokens;
    if (run.done < total) {
      *advanced = true;
      if (run.events->cancelled()) return finish(run.outcome, Finish::cancel);
      run.done = std::min(total, run.done + kChunk);
      run.events->on_prefill(run.done, total);
      if (run.done < total) return std::nullopt;
      if (Status s = failure(r.ids.front(), *run.events); !s.is_ok()) return s;
      held_[r.session] = r.ids;
      return std::nullopt;
    }
    return say(run, advanced);
  }
  std::optional<Result<Outcome>> say(Run& run, bool* advanced) {
    const Request& r = run.request;
    std::vector<uint8_t> mask;
    wait_at_gate();
    MaskAnswer answer = run.events->cancelled() ? MaskAnswer::cancel : MaskAnswer::ready;
    if (r.mask && answer == MaskAnswer::ready) answer = run.events->next_mask(&mask);
    if (answer == MaskAnswer::pending) return std::nullopt;
    *advanced = true;
    if (answer == MaskAnswer::cancel) return finish(run.outcome, Finish::cancel);
    run.id = next(run.id, r.mask ? mask.data() : nullptr);
    if (run.id < 0) return Status{Code::usage, "bad_request", "the mask allows no token"};
    const bool stops = std::count(r.stop_ids.begin(), r.stop_ids.end(), run.id) > 0;
    if (run.id == kEos || stops) return finish(run.outcome, Finish::stop);
    TokenEvent token{run.id, -0.5f, {}};
    for (uint32_t i = 0; i < std::min(r.logprobs, kVocab); ++i)
      token.top.emplace_back(i, -1.0f - static_cast<float>(i));
    run.events->on_token(token);
    held_[r.session].push_back(run.id);
    if (++run.outcome.counters.generated_tokens == r.max_tokens) return finish(run.outcome, Finish::length);
    return std::nullopt;
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
  std::map<std::string, std::vector<int32_t>> held_;  // by session
  std::vector<Run> running_;
  Request last_;
  bool gated_ = false;
  int permits_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace smoe
