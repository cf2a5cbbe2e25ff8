#include "core/sequence.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

namespace smoe {
namespace {

double ms_between(std::chrono::steady_clock::time_point from, std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

Buckets difference(const Buckets& a, const Buckets& b) {
  return {a.attention - b.attention,
          a.router - b.router,
          a.expert_compute - b.expert_compute,
          a.expert_wait - b.expert_wait,
          a.head - b.head,
          a.sampler - b.sampler,
          a.other - b.other};
}

uint64_t whole(double x) { return static_cast<uint64_t>(std::llround(x)); }

}  // namespace

Status out_of_memory() { return {Code::resources, "no_memory", "an allocation failed while handling the request"}; }

Sequence::Sequence(const ModelSpec& model, Conversation& conversation, Sampler& sampler, const Request& request,
                   Events& events, uint32_t cached, uint32_t draft, const Buckets& so_far)
    : model_(model),
      conversation_(conversation),
      sampler_(sampler),
      request_(request),
      events_(events),
      draft_(request.mask ? 0 : draft),
      so_far_(so_far),
      history_(request.ids),
      prompt_at_(cached),
      prompt_end_(request.ids.size()),
      prompt_from_(cached) {
  counters_.prompt_tokens = static_cast<uint32_t>(request.ids.size());
  counters_.cached_tokens = cached;
  if (request.mask) hidden_.resize(model.hidden);
}

Part Sequence::prompt_part(size_t rows) const {
  const bool last = rows == prompt_left();
  return {&conversation_.kv(), history_.data() + prompt_at_, rows, conversation_.length(), last ? rows - 1 : rows};
}

Part Sequence::token_part(size_t guess) {
  next_[0] = history_.back();
  const std::span<const int32_t> proposal = draft_.propose(history_, guess_limit(guess));
  std::copy(proposal.begin(), proposal.end(), next_.begin() + 1);
  counters_.drafted_tokens += static_cast<uint32_t>(proposal.size());
  next_rows_ = 1 + proposal.size();
  return {&conversation_.kv(), next_.data(), next_rows_, conversation_.length(), 0};
}

// How long a guess may be: what comes after it is still wanted, and the conversation can be rolled back over all of it.
size_t Sequence::guess_limit(size_t most) const {
  most = std::min<size_t>(most, request_.max_tokens - counters_.generated_tokens - 1);
  return conversation_.can_take_back(most) ? most : 0;
}

Part Sequence::again(const Part& part, size_t rows) {
  if (conversation_.kv().recurrent().empty()) return part;
  prompt_at_ = conversation_.reuse(history_);
  prompt_end_ = history_.size();
  return prompt_part(std::min(rows, prompt_left()));
}

void Sequence::computed(const Part& part, const PassWork& work) {
  conversation_.append(part.ids, part.rows);
  work_.hits += work.hits;
  work_.misses += work.misses;
  work_.read_bytes += work.read_bytes;
  work_.wait_ms += work.wait_ms;
  work_.guessed += work.guessed;
  work_.guessed_right += work.guessed_right;
  row_ = 0;
  if (!prefilling()) return;
  prompt_at_ += part.rows;
  if (!prefilling()) next_rows_ = 1;
  if (counters_.generated_tokens > 0) return;
  if (!prefilling()) prefilled_ = Clock::now();
  events_.on_prefill(static_cast<uint32_t>(prompt_at_ - prompt_from_),
                     static_cast<uint32_t>(request_.ids.size() - prompt_from_));
}

bool Sequence::wants_token() {
  if (ended_ || row_ == next_rows_) return false;
  poll();
  return !ended_ && ask_mask();
}

// True where a token may be drawn now.
bool Sequence::ask_mask() {
  if (!request_.mask || has_mask_) return true;
  switch (events_.next_mask(&mask_)) {
    case MaskAnswer::ready:
      has_mask_ = true;
      waiting_ = false;
      return true;
    case MaskAnswer::pending:
      waiting_ = true;
      return false;
    case MaskAnswer::cancel:
      end(Finish::cancel);
  }
  return false;
}

bool Sequence::mask_arrived() {
  poll();
  return !ended_ && ask_mask();
}

void Sequence::draw(float* logits) try {
  const bool masked = std::exchange(has_mask_, false);
  draw_status_ = sampler_.sample(logits, history_, history_.size(), masked ? mask_.data() : nullptr, &drawn_);
} catch (const std::bad_alloc&) {
  draw_status_ = out_of_memory();
}

void Sequence::take_drawn() try {
  if (!draw_status_.is_ok()) return fail(draw_status_);
  if (const char* warning = sampler_.take_warning()) events_.on_warning(warning);
  if (is_end(drawn_.id)) return end(Finish::stop);
  append(drawn_);
} catch (const std::bad_alloc&) {
  fail(out_of_memory());
}

void Sequence::append(const TokenEvent& token) {
  ++counters_.generated_tokens;
  events_.on_token(token);
  history_.push_back(token.id);
  const bool came_true = row_ + 1 < next_rows_ && next_[row_ + 1] == token.id;
  counters_.accepted_tokens += came_true;
  if (counters_.generated_tokens == request_.max_tokens) return end(Finish::length);
  if (came_true) {
    ++row_;
    return;
  }
  draft_.settle(row_);
  if (next_rows_ > 1) conversation_.keep_prefix_of(history_);
  row_ = next_rows_;
}

bool Sequence::is_end(int32_t id) const {
  const auto in = [id](const std::vector<int32_t>& set) { return std::find(set.begin(), set.end(), id) != set.end(); };
  return in(model_.eos_ids) || in(request_.stop_ids);
}

void Sequence::poll() {
  if (!ended_ && events_.cancelled()) end(Finish::cancel);
}

void Sequence::fail(Status status) {
  status_ = std::move(status);
  end(Finish::cancel);
}

void Sequence::end(Finish finish) {
  finish_ = finish;
  ended_ = true;
  ended_at_ = Clock::now();
  if (prefilling() && counters_.generated_tokens == 0) prefilled_ = ended_at_;
  conversation_.keep_prefix_of(history_);  // a guess that nobody asked about any more is not part of the conversation
}

Result<Outcome> Sequence::outcome() const {
  if (!status_.is_ok()) return status_;  // what was appended before the failure stays a valid prefix
  Outcome outcome{finish_, counters_, std::nullopt};
  Counters& n = outcome.counters;
  n.prefill_ms = ms_between(began_, prefilled_);
  n.decode_ms = ms_between(prefilled_, ended_at_);
  n.hits = whole(work_.hits);
  n.misses = whole(work_.misses);
  n.read_bytes = whole(work_.read_bytes);
  n.wait_ms = work_.wait_ms;
  n.guessed = whole(work_.guessed);
  n.guessed_right = whole(work_.guessed_right);
  return outcome;
}

Buckets Sequence::buckets(const Buckets& now) const { return difference(now, so_far_); }

}  // namespace smoe
