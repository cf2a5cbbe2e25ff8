#include "core/scratch.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace smoe {
namespace {

// The largest of everything the blocks of a model ask for.
struct Extents {
  size_t q = 0, kv = 0, head_dim = 0, group = 0;
  size_t dense_width = 0, expert_width = 0, top_k = 0, experts = 0;

  explicit Extents(const ModelSpec& model) {
    for (const LayerSpec& layer : model.layers) {
      const AttentionSpec& a = layer.attention;
      q = std::max<size_t>(q, size_t{a.heads} * a.head_dim);
      kv = std::max<size_t>(kv, size_t{a.kv_heads} * a.head_dim);
      head_dim = std::max<size_t>(head_dim, a.head_dim);
      group = std::max<size_t>(group, a.heads / a.kv_heads);
      const FfnSpec& f = layer.ffn;
      dense_width = std::max<size_t>({dense_width, f.width, f.shared_width});
      expert_width = std::max<size_t>(expert_width, f.expert_width);
      top_k = std::max<size_t>(top_k, f.top_k);
      experts = std::max<size_t>(experts, f.experts);
    }
  }
};

// Walks the buffers in order; without memory it only counts.
class Layout {
 public:
  explicit Layout(uint8_t* memory) : memory_(memory) {}
  template <class T>
  void take(T*& field, size_t count) {
    if (memory_ != nullptr) field = reinterpret_cast<T*>(memory_ + offset_);
    offset_ += (count * sizeof(T) + 63) / 64 * 64;
  }
  uint64_t bytes() const { return offset_; }

 private:
  uint8_t* memory_;
  uint64_t offset_ = 0;
};

void lay_out_feed_forward(const Extents& e, size_t T, size_t hidden, Layout& l, Workspace* w) {
  const size_t pairs = T * e.top_k;
  const size_t mid_floats = std::max(T * e.dense_width, pairs * e.expert_width);
  const auto mid_bytes = [&](ActFormat f) {
    return std::max(T * act_row_bytes(f, e.dense_width), pairs * act_row_bytes(f, e.expert_width));
  };
  l.take(w->gate, mid_floats);
  l.take(w->up, mid_floats);
  l.take(w->mid_32, mid_bytes(ActFormat::q8_32));
  l.take(w->mid_256, mid_bytes(ActFormat::q8_256));
  l.take(w->pair_out, pairs * hidden);
  l.take(w->router, T * e.experts);
  l.take(w->chosen, pairs);
  l.take(w->weights, pairs);
  l.take(w->pair_of, pairs);
  l.take(w->pair_row, pairs);
  l.take(w->expert_begin, e.experts + 1);
  l.take(w->expert_order, e.experts);
}

uint64_t lay_out(const ModelSpec& model, size_t T, size_t threads, uint8_t* memory, Workspace* w) {
  const Extents e(model);
  const size_t hidden = model.hidden, widest_input = std::max(hidden, e.q);
  Layout l(memory);
  l.take(w->x, T * hidden);
  l.take(w->normed, T * hidden);
  l.take(w->block_out, T * hidden);
  l.take(w->q, T * e.q);
  l.take(w->k, T * e.kv);
  l.take(w->v, T * e.kv);
  l.take(w->attn, T * e.q);
  w->rows = T;
  w->rope_half = 0;
  for (const RopeSpec& r : model.ropes) w->rope_half = std::max(w->rope_half, r.inv_freq.size());
  l.take(w->rope_cos, model.ropes.size() * T * w->rope_half);
  l.take(w->rope_sin, model.ropes.size() * T * w->rope_half);
  // Two decoded tiles, the scores of one query, and for each query of a tile its running output, maximum and sum.
  const size_t states = kQueryTile * e.group;
  w->attn_worker_floats = (2 * kKeyTile * e.head_dim + kKeyTile + states * (e.head_dim + 2) + 15) / 16 * 16;
  l.take(w->attn_worker, threads * w->attn_worker_floats);
  l.take(w->acts_32, T * act_row_bytes(ActFormat::q8_32, widest_input));
  l.take(w->acts_256, T * act_row_bytes(ActFormat::q8_256, widest_input));
  lay_out_feed_forward(e, T, hidden, l, w);
  l.take(w->logits, std::min(T, kHeadRows) * model.vocab);
  return l.bytes();
}

}  // namespace

uint64_t Scratch::bytes(const ModelSpec& model, uint32_t chunk, uint32_t threads) {
  Workspace unused;
  return lay_out(model, chunk, threads, nullptr, &unused);
}

Result<Scratch> Scratch::allocate(const ModelSpec& model, uint32_t chunk, uint32_t threads) {
  Scratch scratch;
  SMOE_ASSIGN(scratch.memory_, AlignedBuffer::allocate(bytes(model, chunk, threads)));
  lay_out(model, chunk, threads, scratch.memory_.data(), &scratch.workspace_);
  return scratch;
}

}  // namespace smoe
