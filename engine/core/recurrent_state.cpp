#include "core/recurrent_state.h"

#include <algorithm>

namespace smoe {
namespace {

size_t padded(size_t floats) { return (floats + 15) / 16 * 16; }

size_t floats_of(const LayerSpec& layer) {
  if (!layer.attention.is_recurrent()) return 0;
  return padded(layer.recurrent.tail_floats()) + padded(layer.recurrent.state_floats());
}

}  // namespace

uint64_t RecurrentState::bytes(const ModelSpec& model) {
  uint64_t floats = 0;
  for (const LayerSpec& layer : model.layers) floats += floats_of(layer);
  return 3 * floats * sizeof(float);
}

Result<RecurrentState> RecurrentState::allocate(const ModelSpec& model) {
  RecurrentState s;
  for (const LayerSpec& layer : model.layers) {
    const bool used = layer.attention.is_recurrent();
    s.layers_.push_back({s.floats_, s.floats_ + (used ? padded(layer.recurrent.tail_floats()) : 0), used});
    s.floats_ += floats_of(layer);
  }
  SMOE_ASSIGN(s.memory_, AlignedBuffer::allocate(bytes(model)));
  s.copies_ = reinterpret_cast<float*>(s.memory_.data());
  s.now_ = kUnknown;
  s.go_to(0);
  return s;
}

RecurrentLayer RecurrentState::layer(size_t i) const {
  const Place& at = layers_[i];
  if (!at.used) return {};
  return {copy(0) + at.tail, copy(0) + at.state, copy(2) + at.tail, copy(2) + at.state, keep_at_};
}

uint64_t RecurrentState::reachable(uint64_t limit) const {
  uint64_t best = 0;
  for (const uint64_t at : {now_, turn_, reply_})
    if (at != kUnknown && at <= limit) best = std::max(best, at);
  return best;
}

void RecurrentState::go_to(uint64_t position) {
  if (now_ != position) {
    if (position == 0) {
      std::fill_n(copy(0), floats_, 0.0f);
    } else {
      std::copy_n(copy(position == reply_ ? 2 : 1), floats_, copy(0));
    }
  }
  now_ = position;
  keep_at_ = kUnknown;
  cut(position);
}

void RecurrentState::begin_turn(uint64_t end) {
  if (now_ == reply_ && reply_ + 1 == end) return;  // the same prompt once more: its turn has begun before
  if (turn_ != now_ && now_ != 0) std::copy_n(copy(0), floats_, copy(1));
  turn_ = now_;
  reply_ = kUnknown;
  keep_at_ = end - 1;
}

void RecurrentState::done(uint64_t end) {
  now_ = end;
  if (keep_at_ == kUnknown || end <= keep_at_) return;
  reply_ = keep_at_;
  keep_at_ = kUnknown;
}

void RecurrentState::cut(uint64_t end) {
  const auto forget = [end](uint64_t* at) {
    if (*at != kUnknown && *at > end) *at = kUnknown;
  };
  forget(&now_);
  forget(&turn_);
  forget(&reply_);
}

}  // namespace smoe
