#include "core/batcher.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace smoe {
namespace {

CacheStats operator-(const CacheStats& a, const CacheStats& b) {
  CacheStats d;
  d.hits = a.hits - b.hits, d.misses = a.misses - b.misses, d.read_bytes = a.read_bytes - b.read_bytes;
  d.wait_ms = a.wait_ms - b.wait_ms;
  d.guessed = a.guessed - b.guessed, d.guessed_right = a.guessed_right - b.guessed_right;
  return d;
}

PassWork share_of(const CacheStats& pass, double share) {
  const auto part = [share](uint64_t count) { return static_cast<double>(count) * share; };
  return {part(pass.hits),      part(pass.misses),  part(pass.read_bytes),
          pass.wait_ms * share, part(pass.guessed), part(pass.guessed_right)};
}

}  // namespace

Batcher::Batcher(Forward& forward, const ExpertCache& cache, const ModelSpec& model, ThreadPool& pool,
                 const Limits& limits, std::function<void(size_t)> prepare)
    : forward_(forward),
      cache_(cache),
      model_(model),
      pool_(pool),
      limits_(limits),
      choice_(pool.size(), limits.whole_threads),
      prepare_(std::move(prepare)) {
  turns_.reserve(limits.chunk), parts_.reserve(limits.chunk), prompts_.reserve(limits.chunk);
  wanted_.reserve(limits.chunk), draws_.reserve(kHeadRows), hidden_.reserve(kHeadRows);
}

const Buckets& Batcher::begin() {
  if (running_.empty()) forward_.start_buckets();
  forward_.lap(&Buckets::other);
  return forward_.buckets();
}

bool Batcher::step(std::vector<std::unique_ptr<Sequence>>* ended) {
  for (auto& sequence : running_) sequence->poll();
  bool advanced = draw_where_masks_arrived();
  plan_turns();
  if (!turns_.empty()) {
    advanced = true;
    advance();
  }
  forward_.lap(&Buckets::other);
  const auto over = [](const auto& sequence) { return sequence->ended(); };
  for (auto& sequence : running_)
    if (over(sequence)) ended->push_back(std::move(sequence)), advanced = true;
  std::erase(running_, nullptr);
  return advanced;
}

bool Batcher::draw_where_masks_arrived() {
  const size_t most = std::min<size_t>(kHeadRows, limits_.chunk);
  bool any = false;
  for (auto sequence = running_.begin(); sequence != running_.end();) {
    draws_.clear(), hidden_.clear();
    for (; sequence != running_.end() && draws_.size() < most; ++sequence) {
      if (!(*sequence)->waits_for_mask() || !(*sequence)->mask_arrived()) continue;
      draws_.push_back({sequence->get(), nullptr});
      hidden_.push_back((*sequence)->hidden().data());
    }
    if (draws_.empty()) continue;
    any = true;
    float* logits = forward_.logits_of(hidden_);
    for (size_t i = 0; i < draws_.size(); ++i) draws_[i].logits = logits + i * model_.vocab;
    draw_at_once();
  }
  return any;
}

void Batcher::plan_turns() {
  turns_.clear();
  prompts_.clear();
  size_t room = limits_.chunk;
  plan_tokens(&room);
  plan_prompts(room);
  // The last layer is computed from the first wanted row on.
  std::stable_sort(turns_.begin(), turns_.end(),
                   [](const Turn& a, const Turn& b) { return a.part.first > b.part.first; });
}

// Of more sequences than a pass has rows, those that were left out come first next time.
void Batcher::plan_tokens(size_t* room) {
  const auto decodes = [](const auto& s) { return !s->ended() && !s->prefilling() && !s->waits_for_mask(); };
  const auto decoding = static_cast<size_t>(std::count_if(running_.begin(), running_.end(), decodes));
  const size_t guess = guess_for(decoding);
  size_t served = 0;
  for (; served < running_.size() && *room > 0; ++served) {
    Sequence& sequence = *running_[served];
    if (!decodes(running_[served])) continue;
    turns_.push_back({&sequence, sequence.token_part(guess)});
    *room -= turns_.back().part.rows;
  }
  std::rotate(running_.begin(), running_.begin() + static_cast<ptrdiff_t>(served % running_.size()), running_.end());
}

// Tokens for each of the sequences that decode.
size_t Batcher::guess_for(size_t decoding) const {
  if (decoding == 0) return 0;
  if (limits_.draft_where_it_wins && (running_.size() > 1 || !judge_.allows())) return 0;
  return std::min<size_t>(limits_.draft, std::max<size_t>(limits_.step / decoding, 1) - 1);
}

// What is left of the chunk is shared evenly; what a short prompt leaves over goes to the longer ones.
void Batcher::plan_prompts(size_t room) {
  for (auto& sequence : running_)
    if (!sequence->ended() && sequence->prefilling() && prompts_.size() < limits_.chunk)
      prompts_.push_back(sequence.get());
  std::stable_sort(prompts_.begin(), prompts_.end(),
                   [](const Sequence* a, const Sequence* b) { return a->prompt_left() < b->prompt_left(); });
  for (size_t i = 0; i < prompts_.size() && room > 0; ++i) {
    const size_t share = std::max<size_t>(1, room / (prompts_.size() - i));
    turns_.push_back({prompts_[i], prompts_[i]->prompt_part(std::min(share, prompts_[i]->prompt_left()))});
    room -= turns_.back().part.rows;
  }
}

void Batcher::advance() {
  size_t rows = 0;
  for (const Turn& turn : turns_) rows += turn.part.rows;
  pool_.use(choice_.threads(rows));
  const Sequence& first = *turns_[0].sequence;
  const bool decodes_alone = turns_.size() == 1 && !first.prefilling();
  const uint32_t so_far = first.generated();
  const auto began = std::chrono::steady_clock::now();
  const Status status = compute(turns_);
  status.is_ok() ? draw(turns_) : compute_apart();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  choice_.took(rows, seconds);
  if (decodes_alone) judge_.took(rows, first.generated() - so_far, seconds);
}

Status Batcher::compute(std::span<const Turn> turns) try {
  parts_.clear();
  size_t rows = 0;
  for (const Turn& turn : turns) {
    turn.sequence->reserve(turn.part);
    parts_.push_back(turn.part);
    rows += turn.part.rows;
  }
  prepare_(rows);
  const CacheStats before = cache_.stats();
  SMOE_TRY(forward_.run(parts_));
  const CacheStats pass = cache_.stats() - before;
  for (const Turn& turn : turns) {
    const double share = static_cast<double>(turn.part.rows) / static_cast<double>(rows);
    turn.sequence->computed(turn.part, share_of(pass, share));
  }
  return Status::ok();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

void Batcher::compute_apart() {
  for (Turn& turn : turns_) {
    turn.part = turn.sequence->again(turn.part, limits_.chunk);
    const Status status = compute({&turn, 1});
    status.is_ok() ? draw({&turn, 1}) : turn.sequence->fail(status);
  }
}

// The logits of all wanted rows, as many at a time as are held.
void Batcher::draw(std::span<const Turn> turns) {
  wanted_.clear();
  for (const Turn& turn : turns)
    for (size_t nth = 0; nth < turn.part.rows - turn.part.first; ++nth)
      wanted_.push_back({turn.sequence, wanted_.size(), nth});
  for (size_t row = 0; row < wanted_.size(); row += kHeadRows) {
    const size_t rows = std::min(kHeadRows, wanted_.size() - row);
    draw_rows(std::span(wanted_).subspan(row, rows), forward_.logits(row, rows));
  }
}

void Batcher::draw_rows(std::span<const Wanted> rows, float* logits) {
  size_t done = 0;
  for (size_t nth = 0; done < rows.size(); ++nth) {
    draws_.clear();
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].nth != nth) continue;
      ++done;
      Sequence& sequence = *rows[i].sequence;
      const bool waited = sequence.waits_for_mask();
      if (sequence.wants_token()) draws_.push_back({&sequence, logits + i * model_.vocab});
      if (!waited && sequence.waits_for_mask()) forward_.keep(rows[i].row, sequence.hidden().data());
    }
    draw_at_once();
  }
}

void Batcher::draw_at_once() {
  forward_.lap(&Buckets::other);
  pool_.run(draws_.size(), [&](size_t i, size_t) { draws_[i].sequence->draw(draws_[i].logits); });
  forward_.lap(&Buckets::sampler);
  for (const Draw& one : draws_) one.sequence->take_drawn();
}

}  // namespace smoe
