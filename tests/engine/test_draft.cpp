// Guesses from the conversation: what is proposed, and how long after good and bad ones.
#include <algorithm>

#include "check.h"
#include "core/draft.h"

namespace smoe {
namespace {

std::vector<int32_t> propose(NgramDraft& draft, const std::vector<int32_t>& history, size_t limit = 15) {
  const auto guess = draft.propose(history, limit);
  return {guess.begin(), guess.end()};
}

using Ids = std::vector<int32_t>;

TEST(draft_what_followed_the_same_tokens_last) {
  NgramDraft draft(4);
  CHECK(propose(draft, {1, 2, 3, 1, 2, 4, 5, 6, 7, 1, 2}) == Ids({4, 5, 6, 7}));              // the later of two places
  CHECK(propose(draft, {1, 2, 3, 4, 9, 0, 2, 3, 4, 8, 8, 1, 2, 3, 4}) == Ids({9, 0, 2, 3}));  // the longer match
  CHECK(propose(draft, {5, 5, 5}) == Ids({5}));  // it may end where the conversation does
  CHECK(propose(draft, {1, 2, 3, 1, 2}, 1) == Ids({3}));
}

TEST(draft_nothing_without_a_place_to_look_at) {
  NgramDraft draft(4);
  CHECK(propose(draft, {}).empty());
  CHECK(propose(draft, {1}).empty());
  CHECK(propose(draft, {1, 2}).empty());
  CHECK(propose(draft, {1, 2, 3, 4, 2}).empty());  // one token alone is no evidence
  CHECK(propose(draft, {1, 2, 3, 1, 2}, 0).empty());
  NgramDraft none(0);
  CHECK(propose(none, {1, 2, 3, 1, 2}).empty());
}

TEST(draft_longer_after_good_guesses_and_a_pause_after_bad_ones) {
  const Ids text = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 1, 2};
  NgramDraft draft(15);
  for (const size_t length : {4, 8, 15, 15}) {
    CHECK_EQ(propose(draft, text).size(), length);
    draft.settle(length);
  }
  CHECK_EQ(propose(draft, text).size(), size_t{15});
  draft.settle(2);  // a part of it came true
  CHECK_EQ(propose(draft, text).size(), size_t{3});
  for (size_t pause = 1; pause <= 64; pause *= 2) {
    draft.settle(0);
    for (size_t i = 0; i < pause; ++i) CHECK(propose(draft, text).empty());
    CHECK_EQ(propose(draft, text).size(), size_t{1});
  }
  draft.settle(0);
  for (size_t i = 0; i < 64; ++i) CHECK(propose(draft, text).empty());  // no longer than that
  CHECK_EQ(propose(draft, text).size(), size_t{1});
}

TEST(draft_judge_waits_until_it_knows_what_a_token_takes) {
  DraftJudge judge;
  CHECK(!judge.allows());
  judge.took(4, 4, 1.0);  // nothing to compare with
  judge.took(1, 1, 1.0);
  CHECK(!judge.allows());
  judge.took(1, 1, 1.0);
  CHECK(judge.allows());
}

TEST(draft_judge_allows_what_saves_time_and_pauses_what_costs) {
  DraftJudge judge;
  for (int i = 0; i < 4; ++i) judge.took(1, 1, 1.0);
  for (int i = 0; i < 100; ++i) judge.took(4, 3, 2.0);  // three tokens in the time of two
  CHECK(judge.allows());
  for (int i = 0; i < 8; ++i) judge.took(4, 1, 1.1);  // wrong now and then, for nearly nothing
  CHECK(judge.allows());
  int lost = 0;
  for (int pause = 32; pause <= 2048; pause *= 2) {
    for (lost = 0; judge.allows() && lost < 100; ++lost) judge.took(4, 2, 3.5);  // as from a disk
    CHECK(lost < 20);
    int passes = 0;
    for (; !judge.allows() && passes < 5000; ++passes) judge.took(1, 1, 1.0);
    CHECK_EQ(passes, std::min(pause, 1024));
  }
  CHECK(lost <= 2);  // after a pause it is soon found out
  for (int i = 0; i < 20; ++i) judge.took(4, 4, 2.0);
  for (lost = 0; judge.allows() && lost < 100; ++lost) judge.took(4, 1, 3.0);
  int passes = 0;
  for (; !judge.allows() && passes < 5000; ++passes) judge.took(1, 1, 1.0);
  CHECK_EQ(passes, 32);  // it had won meanwhile
}

}  // namespace
}  // namespace smoe
