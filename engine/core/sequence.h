// A request that is being answered: what it wants computed next, and what it makes of the logits. Several advance
// together in one pass (core/batcher.h); none of them knows of the others.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <span>
#include <vector>

#include "blocks/workspace.h"
#include "core/conversation.h"
#include "core/draft.h"
#include "core/forward.h"
#include "core/sampler.h"
#include "experts/cache.h"
#include "smoe/engine.h"

namespace smoe {

static_assert(kMaxDraft < kHeadRows);

// What a pass did on behalf of one of its sequences: its share by rows, so a fraction.
struct PassWork {
  double hits = 0, misses = 0, read_bytes = 0, wait_ms = 0, guessed = 0, guessed_right = 0;
};

// What a sequence fails with where an allocation did.
Status out_of_memory();

class Sequence {
 public:
  // `conversation` holds the prompt's first `cached` ids, `sampler` has begun on the request; both are this sequence's
  // until it ends. `draft`: tokens to guess at most. `so_far`: the buckets when it was started.
  Sequence(const ModelSpec& model, Conversation& conversation, Sampler& sampler, const Request& request, Events& events,
           uint32_t cached, uint32_t draft, const Buckets& so_far);

  bool prefilling() const { return prompt_at_ < prompt_end_; }
  uint32_t generated() const { return counters_.generated_tokens; }
  size_t prompt_left() const { return prompt_end_ - prompt_at_; }
  // The next rows of the prompt, at least one; or the last token, and after it a guess of at most `guess`. Valid until
  // computed().
  Part prompt_part(size_t rows) const;
  Part token_part(size_t guess);
  // A pass that held the part has failed: what is to be computed in its place, at most `rows` of it where a recurrent
  // state has been lost and is made again.
  Part again(const Part& part, size_t rows);
  // Before the part is computed, and after.
  void reserve(const Part& part) { conversation_.reserve(part.rows); }
  void computed(const Part& part, const PassWork& work);

  // The part's next wanted row: true if a token is to be drawn from its logits, which it is not where what came before
  // has ended the reply, or the guess that the row stands on did not come true. Under a mask that has not come yet
  // nothing is drawn: the row's hidden state is to be kept in hidden(), until mask_arrived().
  bool wants_token();
  // Draws it: the one call that several threads may make, each for a sequence of its own.
  void draw(float* logits);
  // Tells the caller of it, and goes on to the next row.
  void take_drawn();
  bool waits_for_mask() const { return waiting_ && !ended(); }
  bool mask_arrived();
  std::vector<float>& hidden() { return hidden_; }

  // Ends the reply if its caller wants no more of it.
  void poll();
  void fail(Status status);
  bool ended() const { return ended_; }
  Events& events() const { return events_; }
  // Of a sequence that has ended.
  Result<Outcome> outcome() const;
  // Where its time went: what the buckets have gathered since it was started, whoever it was for.
  Buckets buckets(const Buckets& now) const;
  bool report_buckets() const { return request_.report_buckets; }

 private:
  using Clock = std::chrono::steady_clock;
  void end(Finish finish);
  bool ask_mask();
  void append(const TokenEvent& token);
  bool is_end(int32_t id) const;
  size_t guess_limit(size_t most) const;

  const ModelSpec& model_;
  Conversation& conversation_;
  Sampler& sampler_;
  const Request request_;
  Events& events_;
  NgramDraft draft_;
  const Buckets so_far_;
  const Clock::time_point began_ = Clock::now();
  Clock::time_point prefilled_{}, ended_at_{};

  std::vector<int32_t> history_;   // prompt and reply
  size_t prompt_at_, prompt_end_;  // of it, what is read without drawing a token
  const size_t prompt_from_;
  std::array<int32_t, kHeadRows> next_{};  // the last token and the guess after it
  size_t next_rows_ = 0, row_ = 0;         // how many of these; the row whose logits come next, next_rows_ if none
  std::vector<uint8_t> mask_;
  bool has_mask_ = false, waiting_ = false, ended_ = false;
  std::vector<float> hidden_;
  TokenEvent drawn_;
  Status draw_status_;

  Finish finish_ = Finish::stop;
  Status status_;
  Counters counters_;
  PassWork work_;
};

}  // namespace smoe
