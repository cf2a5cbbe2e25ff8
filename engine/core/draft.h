// Guesses at the tokens to come: what followed the last few tokens when they stood in the conversation before
// (prompt lookup; Saxena 2023). The model verifies each guess exactly, so a guess changes speed and never the output.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smoe {

inline constexpr uint32_t kMaxDraft = 15;  // with the token before, the rows of logits that are held at once

class NgramDraft {
 public:
  // At most `most` tokens at a time; 0 = never any.
  explicit NgramDraft(uint32_t most) : most_(most), length_(most < kStart ? most : kStart) { guess_.reserve(most); }

  // Up to `limit` tokens that may follow `history`. Valid until the next call.
  std::span<const int32_t> propose(std::span<const int32_t> history, size_t limit);
  // How many of the last proposal came true. Long guesses follow on good ones; after a bad one a pause that doubles,
  // so that a text that does not repeat itself costs next to nothing.
  void settle(size_t accepted);

 private:
  static constexpr size_t kLongest = 4, kShortest = 2;  // tokens that must have stood there before
  static constexpr uint32_t kStart = 4, kLongestPause = 64;

  uint32_t most_, length_;
  uint32_t pause_ = 0, next_pause_ = 1;
  std::vector<int32_t> guess_;
};

}  // namespace smoe
