// Guesses at the tokens to come: what followed the last few tokens when they stood in the conversation before
// (prompt lookup; Saxena 2023). The model verifies each guess exactly, so a guess changes speed and never the output.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace smoe {

inline constexpr uint32_t kAutoDraft = 8;  // --draft auto
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

// Whether guesses are worth their time, which differs by model, by text and by where the experts are: what the tokens
// of a pass with a guess would have taken one by one, against what it took. Where guesses lose, a pause that doubles.
// Of passes that one sequence has for itself.
class DraftJudge {
 public:
  bool allows() const { return passes_alone_ >= kKnown && pause_ == 0; }
  // A pass of so many rows, the guess among them, gave so many tokens.
  void took(size_t rows, size_t tokens, double seconds);

 private:
  static constexpr uint32_t kKnown = 2, kFirstPause = 32, kLongestPause = 1024;
  static constexpr double kWeight = 1.0 / 8;  // of the latest pass
  static constexpr double kEnough = 1.0 / 4;  // tokens a pass won or lost on average, that decide

  double one_s_ = 0;    // of a pass without a guess
  double balance_ = 0;  // tokens won by a pass with one
  uint32_t passes_alone_ = 0, pause_ = 0, next_pause_ = kFirstPause;
};

}  // namespace smoe
