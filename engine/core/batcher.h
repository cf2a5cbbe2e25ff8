// Continuous batching: each pass advances every sequence that can be advanced, by one token (and a guess) where it
// decodes, by what is left of the chunk where it reads its prompt. So a newcomer's prompt holds the others up for one
// chunk at a time, and who waits for a mask holds up nobody.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/forward.h"
#include "core/sequence.h"
#include "core/thread_choice.h"
#include "util/threads.h"

namespace smoe {

class Batcher {
 public:
  // Rows of a pass: at most, and without a prompt; tokens to guess at for one sequence, and whether only
  // where that is faster; threads that a CPU quota never stops.
  struct Limits {
    uint32_t chunk = 0, step = 0, draft = 0;
    bool draft_where_it_wins = false;
    uint32_t whole_threads = 1;
  };
  // References outlive the object. `prepare` is called with the rows of each pass before it.
  Batcher(Forward& forward, const ExpertCache& cache, const ModelSpec& model, ThreadPool& pool, const Limits& limits,
          std::function<void(size_t)> prepare);

  // Before the sequence is made: its time begins.
  const Buckets& begin();
  void add(std::unique_ptr<Sequence> sequence) { running_.push_back(std::move(sequence)); }
  bool empty() const { return running_.empty(); }
  // One pass. False: nothing could be computed, since every sequence waits for its mask. What has ended goes to
  // `ended`.
  bool step(std::vector<std::unique_ptr<Sequence>>* ended);

 private:
  struct Turn {
    Sequence* sequence;
    Part part;
  };

  bool draw_where_masks_arrived();
  // Whose turn it is in this pass, and with what.
  void plan_turns();
  void plan_tokens(size_t* room);
  size_t guess_for(size_t decoding) const;
  void plan_prompts(size_t room);
  void advance();
  Status compute(std::span<const Turn> turns);
  // Every turn by itself, so that what keeps a pass from being computed is told to those that it concerns.
  void compute_apart();
  // A row whose logits are asked for, as the last pass has it, and how many before it are its sequence's.
  struct Wanted {
    Sequence* sequence;
    size_t row, nth;
  };
  struct Draw {
    Sequence* sequence;
    float* logits;
  };
  void draw(std::span<const Turn> turns);
  // Logits [rows.size(), vocab]. A sequence's rows are drawn one after the other, those of different ones at once.
  void draw_rows(std::span<const Wanted> rows, float* logits);
  // draws_, which are of one sequence each.
  void draw_at_once();

  Forward& forward_;
  const ExpertCache& cache_;
  const ModelSpec& model_;
  ThreadPool& pool_;
  const Limits limits_;
  ThreadChoice choice_;
  DraftJudge judge_;
  const std::function<void(size_t)> prepare_;
  std::vector<std::unique_ptr<Sequence>> running_;
  std::vector<Turn> turns_;
  std::vector<Part> parts_;
  std::vector<Sequence*> prompts_;
  std::vector<Wanted> wanted_;
  std::vector<Draw> draws_;
  std::vector<const float*> hidden_;
};

}  // namespace smoe
