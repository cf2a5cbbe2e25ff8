// The states of a conversation's recurrent layers: as they are now, and two copies to go back to, since what was folded
// in cannot be taken out: one from the turn's start, before what is new of its prompt, and one from before the prompt's
// last id, where a reply that is asked for again, or told again without its thoughts, begins.
#pragma once

#include "blocks/recurrent.h"
#include "util/aligned_buffer.h"

namespace smoe {

class RecurrentState {
 public:
  // Of one conversation, copies included; 0 for a model without recurrent layers.
  static uint64_t bytes(const ModelSpec& model);
  static Result<RecurrentState> allocate(const ModelSpec& model);

  bool empty() const { return floats_ == 0; }
  // What block i of the model computes with; without memory where it is not recurrent.
  RecurrentLayer layer(size_t i) const;

  // The largest position, at most `limit`, from which exactly what follows can be computed; 0 = only from the start.
  uint64_t reachable(uint64_t limit) const;
  // Goes back to such a position: 0, or one that reachable() gave.
  void go_to(uint64_t position);
  // A turn begins here, whose prompt ends before `end`: both copies are taken, the second when its position is
  // computed.
  void begin_turn(uint64_t end);
  // Positions up to `end` are about to be computed, or have been: in between the state is that of no position.
  void begin() { now_ = kUnknown; }
  void done(uint64_t end);
  // The conversation ends at `end` from here on, earlier than the state.
  void cut(uint64_t end);

 private:
  static constexpr uint64_t kUnknown = UINT64_MAX;
  struct Place {
    size_t tail = 0, state = 0;
    bool used = false;
  };
  float* copy(size_t which) const { return copies_ + which * floats_; }

  AlignedBuffer memory_;
  float* copies_ = nullptr;  // [3, floats_] in it: now, at the turn's start, before the prompt's last id
  size_t floats_ = 0;
  std::vector<Place> layers_;
  // The positions they belong to, that is how many ids are folded in. Position 0 needs no copy.
  uint64_t now_ = 0, turn_ = kUnknown, reply_ = kUnknown;
  uint64_t keep_at_ = kUnknown;  // where the copy for reply_ is due
};

}  // namespace smoe
