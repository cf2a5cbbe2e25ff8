// Guesses from the conversation: what is proposed, and how long after good and bad ones.
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

}  // namespace
}  // namespace smoe
