// The engine behind include/smoe/engine.h: owns the vault's parts in memory and runs requests over the forward pass.
#include "smoe/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/conversation.h"
#include "core/draft.h"
#include "core/forward.h"
#include "core/info.h"
#include "core/sampler.h"
#include "core/upkeep.h"
#include "experts/history.h"
#include "experts/trace.h"
#include "util/prefault.h"
#include "vault/vault.h"

namespace smoe {
namespace {

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

Status wire_error(const char* name, std::string hint = {}) { return {Code::usage, name, std::move(hint)}; }

// The `count` ids with the largest logits, best first; of equals the lower id.
std::vector<int32_t> most_likely(const float* logits, uint32_t vocab, uint32_t count) {
  const auto better = [&](int32_t a, int32_t b) { return logits[a] > logits[b]; };
  std::vector<int32_t> best;
  for (int32_t id = 0; count && id < static_cast<int32_t>(vocab); ++id) {
    if (best.size() == count && !better(id, best.back())) continue;
    if (best.size() == count) best.pop_back();
    best.insert(std::upper_bound(best.begin(), best.end(), id, better), id);
  }
  return best;
}

class EngineImpl final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> open(const EngineOptions& options, const Log& log);

  const ModelSpec& model() const override { return vault_.model; }
  const Plan& plan() const override { return plan_; }
  std::string info_json() const override;
  Result<Outcome> generate(const Request& request, Events& events) override;
  Result<std::vector<TokenEvent>> score(const std::vector<int32_t>& ids, uint32_t top, Events& events) override;
  Result<std::vector<float>> logits(const std::vector<int32_t>& ids, size_t prefill) override;
  std::vector<int32_t> route_trace() const override { return trace_; }
  void reset() override;
  bool idle() override { return upkeep_->idle(); }
  Buckets buckets() const override { return forward_->buckets(); }

 private:
  explicit EngineImpl(const EngineOptions& options) : options_(options) {}
  Status set_up(const Log& log);
  Status open_cache(const Log& log);
  Status open_trace(const std::string& policy);
  Status check_ids(const std::vector<int32_t>& ids) const;
  Conversation& conversation(const std::string& name);
  // Computes n ids after what the conversation holds; see Forward::run for `first`.
  Status extend(Conversation& c, const int32_t* ids, size_t n, size_t first);
  // Buffers for so many rows, borrowed from the expert cache where they are more than those of a step.
  void fit_scratch(size_t rows);
  // Computes ids[from, ...) in chunks, of the last row all the way to its hidden state. *cancelled after an
  // interruption.
  Status prefill(Conversation& c, const std::vector<int32_t>& ids, size_t from, Events& events, bool* cancelled);
  Status decode(Conversation& c, const Request& request, Events& events, Outcome* outcome);
  Status decode_after(Conversation& c, const Request& request, std::vector<int32_t>* history, Events& events,
                      Outcome* outcome);
  size_t guess_limit(const Conversation& c, uint32_t tokens_left) const;
  Status extend_by_guess(Conversation& c, int32_t token, std::span<const int32_t> guess);
  bool ends(int32_t id, const Request& request) const;
  // Calls row(position, logits) for every position of ids, cold; ids from `prefill` on are computed one at a time.
  template <class F>
  Status every_row(const std::vector<int32_t>& ids, size_t prefill, Events* events, F&& row);
  void begin_counters(Counters* counters);
  void end_counters(Counters* counters);

  EngineOptions options_;
  VaultFile vault_;
  Plan plan_;
  Trunk trunk_;
  Scratch scratch_;
  AlignedBuffer slots_;
  Prefault prefault_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<TraceWriter> trace_file_;  // outlives the cache, which writes to it
  std::unique_ptr<ExpertCache> cache_;
  std::unique_ptr<Upkeep> upkeep_;
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<Sampler> sampler_;
  std::vector<std::unique_ptr<Conversation>> conversations_;
  std::vector<int32_t> trace_;
  std::vector<uint8_t> mask_;
  const Kernels* kernels_ = nullptr;
  CacheStats before_;
  uint64_t clock_ = 0;
};

// --- opening
// -------------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<Engine>> EngineImpl::open(const EngineOptions& options, const Log& log) {
  std::unique_ptr<EngineImpl> engine(new EngineImpl(options));
  SMOE_TRY(engine->set_up(log));
  return std::unique_ptr<Engine>(std::move(engine));
}

Status EngineImpl::set_up(const Log& log) {
  SMOE_ASSIGN(kernels_, choose_kernels(options_.isa));
  SMOE_ASSIGN(vault_, open_vault(options_.vault, options_.scout));
  PlanOptions& p = options_.plan;
  SMOE_ASSIGN(plan_, plan_here(vault_.model, &p, options_.ledger, true));
  if (p.experts_per_token != 0)
    for (LayerSpec& l : vault_.model.layers) l.ffn.top_k = std::min(l.ffn.top_k, p.experts_per_token);
  for (RopeSpec& rope : vault_.model.ropes) {
    if (rope.long_from == 0 || plan_.ctx <= rope.long_from) continue;
    rope.inv_freq = rope.long_inv_freq;  // for every position: keys that are held must fit those that come
    rope.scale = rope.long_scale;
  }
  for (const std::string& warning : plan_.warnings) log("warning: " + warning);

  SMOE_ASSIGN(trunk_, Trunk::load(vault_));
  if (plan_.slots == plan_.total_records) trunk_.preload_embedding();  // nothing is to wait for the disk
  SMOE_ASSIGN(scratch_, Scratch::allocate(vault_.model, plan_.chunk, p.threads));
  SMOE_ASSIGN(slots_, AlignedBuffer::allocate(plan_.cache_slots * plan_.record_bytes));
  // Not beside the trunk's load: where a control group is full of page cache that is being read, huge pages are
  // refused.
  prefault_.start(slots_.data(), slots_.size());
  SMOE_TRY(open_cache(log));
  for (uint32_t i = 0; i < p.sessions; ++i) {
    SMOE_ASSIGN(KvState kv, KvState::allocate(vault_.model, plan_.ctx, plan_.chunk, p.kv));
    conversations_.push_back(std::make_unique<Conversation>(std::move(kv)));
  }
  pool_ = std::make_unique<ThreadPool>(p.threads);
  sampler_ = std::make_unique<Sampler>(vault_.model.vocab);
  const Compute compute{kernels_, pool_.get(), p.float_activations};
  const std::string fingerprint = options_.history.empty() ? "" : history_fingerprint(vault_.manifest_json);
  upkeep_ =
      std::make_unique<Upkeep>(*cache_, plan_, Upkeep::Config{options_.history, fingerprint, "", options_.warm}, log);
  forward_ = std::make_unique<Forward>(vault_.model, trunk_, *cache_, scratch_.workspace(), compute, options_.spec);
  return Status::ok();
}

Status EngineImpl::open_cache(const Log& log) {
  ExpertCache::Config config;
  config.records = vault_.records;
  config.slots = plan_.cache_slots;
  config.residents = plan_.slots;
  config.slot_bytes = plan_.record_bytes;
  config.verify_reads = options_.verify_reads;
  if (options_.cache_policy.empty()) options_.cache_policy = kDefaultPolicy;
  config.policy = options_.cache_policy;
  config.memory = slots_.data();
  config.discard = [this](uint64_t offset, uint64_t bytes) {
    prefault_.stop();
    slots_.discard(offset, bytes);
  };
  config.committed = [this] { return prefault_.committed(); };
  SMOE_TRY(open_trace(config.policy));
  config.log = trace_file_.get();
  ReaderOptions reads;
  if (options_.read_mode == ReadMode::direct) reads.mode = DirectMode::direct;
  if (options_.read_mode == ReadMode::buffered) reads.mode = DirectMode::buffered;
  if (options_.io == IoBackend::uring) reads.kind = ReaderKind::uring;
  if (options_.io == IoBackend::pread) reads.kind = ReaderKind::pread;
  reads.workers = options_.io_workers != 0 ? options_.io_workers : config.depth;
  reads.slots = {slots_.data(), config.slot_bytes, config.slots};
  std::vector<std::string> notices;
  SMOE_ASSIGN(std::unique_ptr<Reader> reader, open_reader(vault_.path, reads, &notices));
  for (const std::string& notice : notices) log("notice: " + notice);
  SMOE_ASSIGN(cache_, ExpertCache::create(std::move(config), std::move(reader)));
  return Status::ok();
}

Status EngineImpl::open_trace(const std::string& policy) {
  if (options_.trace.empty()) return Status::ok();
  TraceHeader header{vault_.model.id, policy, plan_.slots, {}, {}};
  for (const LayerSpec& layer : vault_.model.layers) {
    if (!layer.ffn.is_moe()) continue;
    header.experts.push_back(layer.ffn.experts);
    header.top_k.push_back(layer.ffn.top_k);
  }
  SMOE_ASSIGN(trace_file_, TraceWriter::open(options_.trace, header));
  return Status::ok();
}

// --- requests
// ------------------------------------------------------------------------------------------------------------

Status EngineImpl::check_ids(const std::vector<int32_t>& ids) const {
  if (ids.empty()) return wire_error("empty_suffix");
  for (const int32_t id : ids)
    if (id < 0 || static_cast<uint32_t>(id) >= vault_.model.vocab)
      return wire_error("bad_request", "id " + std::to_string(id) + " is outside the vocabulary of " +
                                           std::to_string(vault_.model.vocab));
  return Status::ok();
}

// The named conversation, or the least recently used one, emptied and renamed.
Conversation& EngineImpl::conversation(const std::string& name) {
  Conversation* oldest = conversations_.front().get();
  for (auto& c : conversations_) {
    if (c->name == name) {
      c->last_use = ++clock_;
      return *c;
    }
    if (c->last_use < oldest->last_use) oldest = c.get();
  }
  oldest->clear();
  oldest->name = name;
  oldest->last_use = ++clock_;
  return *oldest;
}

Status EngineImpl::extend(Conversation& c, const int32_t* ids, size_t n, size_t first) {
  c.reserve(n);
  fit_scratch(n);
  SMOE_TRY(forward_->run(c.kv(), ids, n, c.length(), first));
  c.append(ids, n);
  return Status::ok();
}

void EngineImpl::fit_scratch(size_t rows) {
  const uint32_t threads = options_.plan.threads;
  if (rows <= scratch_.own_rows()) {
    if (cache_->lent() == 0) return;
    scratch_.use_own(vault_.model, threads);
    cache_->lend(0);
  } else if (cache_->lent() == 0 || rows > scratch_.workspace().rows) {
    const auto n = static_cast<uint32_t>(rows);
    const uint64_t bytes = Scratch::chunk_bytes(vault_.model, n, threads), slot = plan_.record_bytes;
    scratch_.use(vault_.model, n, threads, cache_->lend(static_cast<uint32_t>((bytes + slot - 1) / slot)));
  }
}

Status EngineImpl::prefill(Conversation& c, const std::vector<int32_t>& ids, size_t from, Events& events,
                           bool* cancelled) {
  const size_t total = ids.size() - from;
  for (size_t at = from; at < ids.size();) {
    if (events.cancelled()) {
      *cancelled = true;
      return Status::ok();
    }
    const size_t T = std::min<size_t>(plan_.chunk, ids.size() - at);
    const bool last = at + T == ids.size();
    SMOE_TRY(extend(c, ids.data() + at, T, last ? T - 1 : T));
    at += T;
    events.on_prefill(static_cast<uint32_t>(at - from), static_cast<uint32_t>(total));
  }
  return Status::ok();
}

bool EngineImpl::ends(int32_t id, const Request& request) const {
  const auto in = [id](const std::vector<int32_t>& set) { return std::find(set.begin(), set.end(), id) != set.end(); };
  return in(vault_.model.eos_ids) || in(request.stop_ids);
}

// Samples until an end. The hidden state of the last position is in the workspace; the step after the last token is not
// computed. A run computes the last token and a guess at those after it: row 0 of its logits is what follows the last
// token, row i what follows guess[0, i) as well, and counts only while the guess has come true.
Status EngineImpl::decode(Conversation& c, const Request& request, Events& events, Outcome* outcome) {
  std::vector<int32_t> history(request.ids);
  const Status status = decode_after(c, request, &history, events, outcome);
  c.keep_prefix_of(history);  // a guess that nobody asked about any more is not part of the conversation
  return status;
}

Status EngineImpl::decode_after(Conversation& c, const Request& request, std::vector<int32_t>* history, Events& events,
                                Outcome* outcome) {
  NgramDraft draft(request.mask ? 0 : options_.draft);
  std::span<const int32_t> guess;
  Counters& counters = outcome->counters;
  const float* logits = forward_->logits(0, 1);
  size_t row = 0;
  while (true) {
    if (events.cancelled() || (request.mask && !events.next_mask(&mask_))) {
      outcome->finish = Finish::cancel;
      return Status::ok();
    }
    TokenEvent token;
    forward_->lap(&Buckets::other);
    SMOE_TRY(sampler_->sample(logits + row * vault_.model.vocab, *history, history->size(),
                              request.mask ? mask_.data() : nullptr, &token));
    forward_->lap(&Buckets::sampler);
    if (const char* warning = sampler_->take_warning()) events.on_warning(warning);
    if (ends(token.id, request)) {
      outcome->finish = Finish::stop;
      return Status::ok();
    }
    ++counters.generated_tokens;
    events.on_token(token);
    history->push_back(token.id);
    const bool came_true = row < guess.size() && guess[row] == token.id;
    counters.accepted_tokens += came_true;
    if (counters.generated_tokens == request.max_tokens) {
      outcome->finish = Finish::length;
      return Status::ok();
    }
    if (came_true) {
      ++row;
      continue;
    }
    draft.settle(row);
    if (!guess.empty()) c.keep_prefix_of(*history);
    guess = draft.propose(*history, guess_limit(c, request.max_tokens - counters.generated_tokens));
    counters.drafted_tokens += guess.size();
    SMOE_TRY(extend_by_guess(c, token.id, guess));
    logits = forward_->logits(0, 1 + guess.size());
    row = 0;
  }
}

static_assert(kMaxDraft < kHeadRows);

// How long a guess may be: its rows and the one before fit a chunk and the logits held, what comes after them is still
// wanted, and the conversation can be rolled back over all of them.
size_t EngineImpl::guess_limit(const Conversation& c, uint32_t tokens_left) const {
  const size_t most = std::min<size_t>({options_.draft, plan_.chunk - 1, tokens_left - 1});
  return c.can_take_back(most) ? most : 0;
}

Status EngineImpl::extend_by_guess(Conversation& c, int32_t token, std::span<const int32_t> guess) {
  int32_t ids[kHeadRows] = {token};
  std::copy(guess.begin(), guess.end(), ids + 1);
  return extend(c, ids, 1 + guess.size(), 0);
}

void EngineImpl::begin_counters(Counters* counters) {
  *counters = {};
  before_ = cache_->stats();
}

void EngineImpl::end_counters(Counters* counters) {
  const CacheStats now = cache_->stats();
  counters->hits = now.hits - before_.hits;
  counters->misses = now.misses - before_.misses;
  counters->read_bytes = now.read_bytes - before_.read_bytes;
  counters->wait_ms = now.wait_ms - before_.wait_ms;
  counters->guessed = now.guessed - before_.guessed;
  counters->guessed_right = now.guessed_right - before_.guessed_right;
}

Result<Outcome> EngineImpl::generate(const Request& request, Events& events) {
  SMOE_TRY(check_ids(request.ids));
  if (request.max_tokens == 0) return wire_error("bad_request", "max_tokens is 0");
  if (!request.slide && request.ids.size() > plan_.ctx) return wire_error("ctx_overflow");
  SMOE_TRY(sampler_->begin(request, options_.penalty_exempt));
  Outcome outcome;
  Counters& n = outcome.counters;
  upkeep_->before_request();
  begin_counters(&n);
  Conversation& c = conversation(request.session);
  n.prompt_tokens = static_cast<uint32_t>(request.ids.size());
  n.cached_tokens = c.reuse(request.ids);
  events.on_begin(n.prompt_tokens, n.cached_tokens);

  auto start = Clock::now();
  forward_->start_buckets();
  bool cancelled = false;
  Status status = prefill(c, request.ids, n.cached_tokens, events, &cancelled);
  n.prefill_ms = ms_since(start);
  start = Clock::now();
  if (cancelled) {
    outcome.finish = Finish::cancel;
  } else if (status.is_ok()) {
    status = decode(c, request, events, &outcome);
  }
  n.decode_ms = ms_since(start);
  forward_->lap(&Buckets::other);
  if (request.report_buckets) outcome.buckets = forward_->buckets();
  end_counters(&n);
  fit_scratch(1);
  upkeep_->after_request();
  if (trace_file_) SMOE_TRY(trace_file_->flush());
  if (!status.is_ok()) return status;  // what was appended before the failure stays a valid prefix
  return outcome;
}

template <class F>
Status EngineImpl::every_row(const std::vector<int32_t>& ids, size_t prefill, Events* events, F&& row) {
  SMOE_TRY(check_ids(ids));
  Conversation& c = conversation("");
  c.clear();
  for (size_t at = 0; at < ids.size();) {
    if (events != nullptr && events->cancelled()) return {Code::cancelled, "cancelled"};
    const size_t T = at < prefill ? std::min<size_t>(plan_.chunk, std::min(prefill, ids.size()) - at) : 1;
    SMOE_TRY(extend(c, ids.data() + at, T, 0));
    for (size_t r = 0; r < T; r += kHeadRows) {
      const size_t rows = std::min(kHeadRows, T - r);
      const float* logits = forward_->logits(r, rows);
      for (size_t i = 0; i < rows; ++i) row(at + r + i, logits + i * vault_.model.vocab);
    }
    at += T;
    if (events != nullptr) events->on_prefill(static_cast<uint32_t>(at), static_cast<uint32_t>(ids.size()));
  }
  fit_scratch(1);
  return Status::ok();
}

Result<std::vector<TokenEvent>> EngineImpl::score(const std::vector<int32_t>& ids, uint32_t top, Events& events) {
  std::vector<TokenEvent> scored;
  const uint32_t vocab = vault_.model.vocab;
  SMOE_TRY(every_row(ids, ids.size(), &events, [&](size_t position, const float* logits) {
    if (position + 1 == ids.size()) return;
    const float best = *std::max_element(logits, logits + vocab);
    double sum = 0;
    for (uint32_t i = 0; i < vocab; ++i) sum += std::exp(double{logits[i]} - best);
    const auto logprob = [&](int32_t id) { return static_cast<float>(logits[id] - best - std::log(sum)); };
    TokenEvent& token = scored.emplace_back();
    token.id = ids[position + 1];
    token.logprob = logprob(token.id);
    for (int32_t id : most_likely(logits, vocab, top)) token.top.emplace_back(id, logprob(id));
  }));
  return scored;
}

Result<std::vector<float>> EngineImpl::logits(const std::vector<int32_t>& ids, size_t prefill) {
  std::vector<float> all;
  all.reserve(ids.size() * vault_.model.vocab);
  trace_.clear();
  forward_->trace_into(&trace_);
  const Status status = every_row(ids, prefill, nullptr, [&](size_t, const float* logits) {
    all.insert(all.end(), logits, logits + vault_.model.vocab);
  });
  forward_->trace_into(nullptr);
  if (!status.is_ok()) return status;
  return all;
}

void EngineImpl::reset() {
  for (auto& c : conversations_) c->clear();
}

std::string EngineImpl::info_json() const {
  const Residency& held = cache_->residency();
  const CacheInfo cache{options_.cache_policy, std::min(held.slots(), plan_.slots), held.held(), upkeep_->warmed()};
  return engine_info(vault_.model, plan_, kernels_->name, options_.plan, cache_->reader().stats(), cache);
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::open(const EngineOptions& options, Log log) {
  return EngineImpl::open(options, log);
}

}  // namespace smoe
