// The engine behind include/smoe/engine.h: owns the vault's parts in memory and runs requests over the forward pass.
#include "smoe/engine.h"

#include <algorithm>
#include <cmath>

#include "core/batcher.h"
#include "core/conversation.h"
#include "core/forward.h"
#include "core/info.h"
#include "core/reads.h"
#include "core/sampler.h"
#include "core/upkeep.h"
#include "experts/history.h"
#include "experts/trace.h"
#include "util/prefault.h"
#include "vault/vault.h"

namespace smoe {
namespace {

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
  bool room_for(const std::string& session) const override;
  Status start(const Request& request, Events& events) override;
  bool step(std::vector<Ended>* ended) override;
  Result<std::vector<TokenEvent>> score(const std::vector<int32_t>& ids, uint32_t top, Events& events) override;
  Result<std::vector<float>> logits(const std::vector<int32_t>& ids, size_t prefill) override;
  std::vector<int32_t> route_trace() const override { return trace_; }
  void reset() override;
  bool idle() override;
  Buckets buckets() const override { return last_buckets_; }
  std::vector<ColumnSum> column_sums() const override { return columns_ ? columns_->all() : std::vector<ColumnSum>(); }

 private:
  explicit EngineImpl(const EngineOptions& options) : options_(options) {}
  Status set_up(const Log& log);
  Status open_cache(const Log& log);
  Status open_trace(const std::string& policy);
  Status check_ids(const std::vector<int32_t>& ids) const;
  // A resident conversation, and what answers a request in it. events: of the request that runs; null = none does.
  struct Seat {
    Conversation conversation;
    Sampler sampler;
    Events* events = nullptr;
  };
  const Seat* seat_of(const std::string& session) const;
  // The session's seat, or of those where nothing runs the least recently used one.
  Seat& find_seat(const std::string& session);
  // Its conversation is this session's from now on.
  Conversation& claim(Seat& seat, const std::string& session);
  Ended leave(const Sequence& sequence);
  // Computes n ids after what the conversation holds; see Forward::run for `first`.
  Status extend(Conversation& c, const int32_t* ids, size_t n, size_t first);
  // Buffers for so many rows, borrowed from the expert cache where they are more than those of a step.
  void fit_scratch(size_t rows);
  // Calls row(position, logits) for every position of ids, cold; ids from `prefill` on are computed one at a time.
  template <class F>
  Status every_row(const std::vector<int32_t>& ids, size_t prefill, Events* events, F&& row);

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
  std::unique_ptr<ColumnSums> columns_;
  std::unique_ptr<Forward> forward_;
  std::vector<Seat> seats_;
  std::unique_ptr<Batcher> batcher_;
  std::vector<int32_t> trace_;
  const Kernels* kernels_ = nullptr;
  Buckets last_buckets_;
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
  const uint32_t whole_threads = p.threads != 0 ? p.threads : usable_cpus().whole;  // what is asked for is not varied
  SMOE_ASSIGN(plan_, plan_here(vault_.model, &p, options_.ledger, true));
  if (p.experts_per_token != 0)
    for (LayerSpec& l : vault_.model.layers) l.ffn.top_k = std::min(l.ffn.top_k, p.experts_per_token);
  for (RopeSpec& rope : vault_.model.ropes) {
    if (rope.long_from == 0 || plan_.ctx <= rope.long_from) continue;
    rope.inv_freq = rope.long_inv_freq;  // for every position: keys that are held must fit those that come
    rope.scale = rope.long_scale;
  }
  for (const std::string& warning : plan_.warnings) log("warning: " + warning);
  if (options_.draft != 0 && !options_.draft_where_it_wins && plan_.recurrent_bytes != 0)
    log("warning: --draft guesses nothing with this model: its recurrent layers cannot take a wrong guess back");

  SMOE_ASSIGN(trunk_, Trunk::load(vault_, reads_of(options_)));
  SMOE_ASSIGN(scratch_,
              Scratch::allocate(vault_.model, Scratch::own_rows(vault_.model, plan_.chunk, p.sessions), p.threads));
  SMOE_ASSIGN(slots_, AlignedBuffer::allocate(plan_.cache_slots * plan_.record_bytes));
  prefault_.start(slots_.data(), slots_.size());
  SMOE_TRY(open_cache(log));
  seats_.reserve(p.sessions);
  for (uint32_t i = 0; i < p.sessions; ++i) {
    SMOE_ASSIGN(KvState kv, KvState::allocate(vault_.model, plan_.ctx, plan_.chunk, p.kv));
    seats_.push_back({Conversation(std::move(kv)), Sampler(vault_.model.vocab)});
  }
  pool_ = std::make_unique<ThreadPool>(p.threads);
  if (options_.watch_columns) {
    columns_ = std::make_unique<ColumnSums>(vault_.model);
    for (const auto& [name, matrix] : trunk_.matrices()) columns_->watch(name, matrix);
  }
  const Compute compute{kernels_, pool_.get(), p.float_activations, columns_.get()};
  const std::string fingerprint = options_.history.empty() ? "" : history_fingerprint(vault_.manifest_json);
  upkeep_ =
      std::make_unique<Upkeep>(*cache_, plan_, Upkeep::Config{options_.history, fingerprint, "", options_.warm}, log);
  forward_ = std::make_unique<Forward>(vault_.model, trunk_, *cache_, scratch_.workspace(), compute, options_.spec);
  const Batcher::Limits limits{plan_.chunk, scratch_.own_rows(), options_.draft, options_.draft_where_it_wins,
                               whole_threads};
  batcher_ =
      std::make_unique<Batcher>(*forward_, *cache_, vault_.model, *pool_, limits, [this](size_t n) { fit_scratch(n); });
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
  ReaderOptions how = reads_of(options_);
  how.slots = {slots_.data(), config.slot_bytes, config.slots};
  std::vector<std::string> notices;
  SMOE_ASSIGN(std::unique_ptr<Reader> reader, open_reader(vault_.path, how, &notices));
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

const EngineImpl::Seat* EngineImpl::seat_of(const std::string& session) const {
  const auto seat =
      std::find_if(seats_.begin(), seats_.end(), [&](const Seat& s) { return s.conversation.name == session; });
  return seat == seats_.end() ? nullptr : &*seat;
}

EngineImpl::Seat& EngineImpl::find_seat(const std::string& session) {
  const Seat* seat = seat_of(session);
  if (seat == nullptr) {
    seat = &*std::min_element(seats_.begin(), seats_.end(), [](const Seat& a, const Seat& b) {
      const auto age = [](const Seat& s) { return std::pair(s.events != nullptr, s.conversation.last_use); };
      return age(a) < age(b);
    });
  }
  return seats_[static_cast<size_t>(seat - seats_.data())];
}

Conversation& EngineImpl::claim(Seat& seat, const std::string& session) {
  Conversation& c = seat.conversation;
  if (c.name != session) c.clear();
  c.name = session;
  c.last_use = ++clock_;
  return c;
}

Status EngineImpl::extend(Conversation& c, const int32_t* ids, size_t n, size_t first) {
  c.reserve(n);
  fit_scratch(n);
  const Part part{&c.kv(), ids, n, c.length(), first};
  SMOE_TRY(forward_->run({&part, 1}));
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

bool EngineImpl::room_for(const std::string& session) const {
  if (std::all_of(seats_.begin(), seats_.end(), [](const Seat& seat) { return seat.events != nullptr; })) return false;
  const Seat* seat = seat_of(session);
  return seat == nullptr || seat->events == nullptr;
}

Status EngineImpl::start(const Request& request, Events& events) {
  SMOE_TRY(check_ids(request.ids));
  if (request.max_tokens == 0) return wire_error("bad_request", "max_tokens is 0");
  if (!request.slide && request.ids.size() > plan_.ctx) return wire_error("ctx_overflow");
  if (!room_for(request.session)) return {Code::failed, "start() without room_for()"};
  Seat& seat = find_seat(request.session);
  SMOE_TRY(seat.sampler.begin(request, options_.penalty_exempt));
  fit_scratch(1);
  upkeep_->before_request();
  const Buckets& so_far = batcher_->begin();
  Conversation& c = claim(seat, request.session);
  const uint32_t cached = c.reuse(request.ids);
  batcher_->add(
      std::make_unique<Sequence>(vault_.model, c, seat.sampler, request, events, cached, options_.draft, so_far));
  seat.events = &events;
  events.on_begin(static_cast<uint32_t>(request.ids.size()), cached);
  return Status::ok();
}

bool EngineImpl::step(std::vector<Ended>* ended) {
  if (batcher_->empty()) return false;
  std::vector<std::unique_ptr<Sequence>> over;
  const bool advanced = batcher_->step(&over);
  for (const auto& sequence : over) ended->push_back(leave(*sequence));
  return advanced;
}

Engine::Ended EngineImpl::leave(const Sequence& sequence) {
  const auto seat =
      std::find_if(seats_.begin(), seats_.end(), [&](const Seat& s) { return s.events == &sequence.events(); });
  seat->events = nullptr;
  if (batcher_->empty()) fit_scratch(1);
  upkeep_->after_request();
  last_buckets_ = sequence.buckets(forward_->buckets());
  Ended ended{&sequence.events(), sequence.outcome()};
  if (ended.outcome.is_ok() && sequence.report_buckets()) ended.outcome->buckets = last_buckets_;
  const Status flushed = trace_file_ ? trace_file_->flush() : Status::ok();
  if (!flushed.is_ok()) ended.outcome = flushed;
  return ended;
}

template <class F>
Status EngineImpl::every_row(const std::vector<int32_t>& ids, size_t prefill, Events* events, F&& row) {
  SMOE_TRY(check_ids(ids));
  Conversation& c = claim(find_seat(""), "");
  c.clear();
  pool_->use(pool_->size());
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

bool EngineImpl::idle() {
  if (upkeep_->idle()) return true;
  // With all experts in memory nothing is to wait for the disk.
  return options_.warm && plan_.slots == plan_.total_records && trunk_.preload_embedding();
}

void EngineImpl::reset() {
  for (Seat& seat : seats_) seat.conversation.clear();
}

std::string EngineImpl::info_json() const {
  const Residency& held = cache_->residency();
  const CacheInfo cache{options_.cache_policy, std::min(held.slots(), plan_.slots), held.held(), upkeep_->warmed(),
                        upkeep_->warming()};
  return engine_info(vault_.model, plan_, kernels_->name, options_.plan, cache_->reader().stats(), cache);
}

}  // namespace

Result<Outcome> Engine::generate(const Request& request, Events& events) {
  SMOE_TRY(start(request, events));
  std::vector<Ended> ended;
  while (ended.empty())
    if (!step(&ended)) events.wait();
  return std::move(ended.front().outcome);
}

Result<std::unique_ptr<Engine>> Engine::open(const EngineOptions& options, Log log) {
  return EngineImpl::open(options, log);
}

}  // namespace smoe
