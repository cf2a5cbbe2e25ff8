#include "core/scratch.h"

#include <algorithm>

#include "blocks/attention_mla.h"
#include "kernels/kernels.h"

namespace smoe {
namespace {

// The largest of everything the blocks of a model ask for.
struct Extents {
  size_t q = 0, k = 0, v = 0, attn = 0, attn_gate = 0, attend_worker = 0, attend_spans = 0;
  size_t recur_a = 0, recur_b = 0, recur_rank = 0;
  size_t q_rank = 0, nope_q = 0, latent_q = 0, latent_out = 0;
  size_t input_rows_bytes[2] = {};  // int8 forms of the heads' batches of latent attention
  size_t dense_width = 0, expert_width = 0, top_k = 0, experts = 0, choice = 0, pair_weight = 0;

  Extents(const ModelSpec& model, size_t threads) {
    for (const LayerSpec& layer : model.layers) {
      const AttentionSpec& a = layer.attention;
      a.is_recurrent() ? add_recurrent(a.block, layer.recurrent) : add_attention(a, threads);
      const FfnSpec& f = layer.ffn;
      dense_width = std::max<size_t>({dense_width, f.width, f.shared_width});
      expert_width = std::max<size_t>(expert_width, f.expert_width);
      top_k = std::max<size_t>(top_k, f.top_k);
      experts = std::max<size_t>(experts, f.experts);
      if (f.scale_input) pair_weight = std::max<size_t>(pair_weight, f.top_k);
      if (f.correction || f.groups > 1) choice = std::max<size_t>(choice, f.experts);
    }
  }

 private:
  void add_attention(const AttentionSpec& a, size_t threads) {
    attend_worker = std::max(attend_worker, attend_worker_floats(a.head_dim, a.heads / a.kv_heads));
    attend_spans = std::max(attend_spans, attend_span_floats(a.head_dim, a.heads / a.kv_heads, threads));
    k = std::max<size_t>(k, size_t{a.kv_heads} * a.head_dim);
    a.block == AttentionBlock::mla ? add_mla(a) : add_gqa(a);
  }

  void add_gqa(const AttentionSpec& a) {
    const size_t row = size_t{a.heads} * a.head_dim;
    q = std::max(q, row);
    attn = std::max(attn, row);
    if (a.gated) attn_gate = std::max(attn_gate, row);
    v = std::max<size_t>(v, size_t{a.kv_heads} * a.head_dim);
  }

  void add_recurrent(AttentionBlock block, const RecurrentSpec& r) {
    const size_t values = r.values();
    v = std::max(v, values);
    attn = std::max(attn, values);
    recur_rank = std::max<size_t>(recur_rank, r.rank);
    const auto ask = [](size_t most, size_t* extent) { *extent = std::max(*extent, most); };
    if (block == AttentionBlock::short_conv) ask(3 * values, &q);
    if (block == AttentionBlock::mamba2) ask(values + r.channels() + r.heads, &q);
    if (block == AttentionBlock::mamba) {
      ask(2 * values, &q);
      ask(r.rank + 2 * r.key_dim, &recur_a);
      ask(values, &recur_b);
    }
    if (block == AttentionBlock::delta) {
      ask(r.keys(), &q);
      ask(r.keys(), &k);
      ask(values, &attn_gate);
      ask(r.channel_decay ? r.keys() : r.heads, &recur_a);
      ask(r.heads, &recur_b);
    }
  }

  void add_mla(const AttentionSpec& a) {
    const size_t heads = a.heads, batch = heads * kLatentRows;
    q = std::max(q, heads * (a.nope_dim + a.rope_dim));
    attn = std::max(attn, heads * a.v_dim);
    q_rank = std::max<size_t>(q_rank, a.q_rank);
    nope_q = std::max(nope_q, batch * a.nope_dim);
    latent_q = std::max(latent_q, batch * a.head_dim);
    latent_out = std::max(latent_out, batch * a.kv_rank);
    const size_t widest = std::max(a.nope_dim, a.kv_rank);
    input_rows_bytes[0] = std::max(input_rows_bytes[0], batch * act_row_bytes(ActFormat::q8_32, widest));
    input_rows_bytes[1] = std::max(input_rows_bytes[1], batch * act_row_bytes(ActFormat::q8_256, widest));
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
  l.take(w->choice, T * e.choice);
  l.take(w->chosen, pairs);
  l.take(w->weights, pairs);
  l.take(w->pair_of, pairs);
  l.take(w->pair_row, pairs);
  l.take(w->pair_weight, T * e.pair_weight);
  l.take(w->expert_begin, e.experts + 1);
  l.take(w->expert_order, e.experts);
  l.take(w->expert_uses, e.experts);
  l.take(w->ahead_chosen, pairs);
  l.take(w->ahead_weights, pairs);
  l.take(w->ahead_experts, e.experts);
  l.take(w->ahead_uses, e.experts);
}

// Without the logits, which stay where they are.
uint64_t lay_out(const ModelSpec& model, size_t T, size_t threads, uint8_t* memory, Workspace* w) {
  const Extents e(model, threads);
  const size_t hidden = model.hidden, widest_input = std::max({hidden, e.attn, e.q_rank, e.recur_rank});
  Layout l(memory);
  l.take(w->x, T * hidden);
  l.take(w->normed, T * hidden);
  l.take(w->block_out, T * hidden);
  l.take(w->q, T * e.q);
  l.take(w->k, T * e.k);
  l.take(w->v, T * e.v);
  l.take(w->attn, T * e.attn);
  l.take(w->attn_gate, T * e.attn_gate);
  l.take(w->recur_a, T * e.recur_a);
  l.take(w->recur_b, T * e.recur_b);
  l.take(w->recur_rank, 2 * T * e.recur_rank);
  l.take(w->q_latent, T * e.q_rank);
  l.take(w->nope_q, e.nope_q);
  l.take(w->latent_q, e.latent_q);
  l.take(w->latent_out, e.latent_out);
  w->rows = T;
  w->rope_half = 0;
  for (const RopeSpec& r : model.ropes) w->rope_half = std::max(w->rope_half, r.inv_freq.size());
  l.take(w->rope_cos, model.ropes.size() * T * w->rope_half);
  l.take(w->rope_sin, model.ropes.size() * T * w->rope_half);
  w->attn_worker_floats = e.attend_worker;
  l.take(w->attn_worker, threads * w->attn_worker_floats);
  l.take(w->attn_spans, e.attend_spans);
  l.take(w->acts_32, std::max(T * act_row_bytes(ActFormat::q8_32, widest_input), e.input_rows_bytes[0]));
  l.take(w->acts_256, std::max(T * act_row_bytes(ActFormat::q8_256, widest_input), e.input_rows_bytes[1]));
  lay_out_feed_forward(e, T, hidden, l, w);
  return l.bytes();
}

uint64_t logits_bytes(const ModelSpec& model, size_t rows) {
  return (std::min(rows, kHeadRows) * model.vocab * sizeof(float) + 63) / 64 * 64;
}

}  // namespace

uint32_t Scratch::own_rows(const ModelSpec& model, uint32_t chunk, uint32_t sessions) {
  const bool experts = std::any_of(model.layers.begin(), model.layers.end(), [](auto& l) { return l.ffn.is_moe(); });
  return experts ? std::min(chunk, std::max<uint32_t>(kHeadRows, sessions)) : chunk;
}

uint64_t Scratch::chunk_bytes(const ModelSpec& model, uint32_t rows, uint32_t threads) {
  Workspace unused;
  return lay_out(model, rows, threads, nullptr, &unused);
}

uint64_t Scratch::bytes(const ModelSpec& model, uint32_t rows, uint32_t threads) {
  return logits_bytes(model, rows) + chunk_bytes(model, rows, threads);
}

Result<Scratch> Scratch::allocate(const ModelSpec& model, uint32_t own_rows, uint32_t threads) {
  Scratch scratch;
  scratch.own_rows_ = own_rows;
  SMOE_ASSIGN(scratch.memory_, AlignedBuffer::allocate(bytes(model, scratch.own_rows_, threads)));
  scratch.workspace_.logits = scratch.memory_.as<float>();
  scratch.use_own(model, threads);
  return scratch;
}

void Scratch::use(const ModelSpec& model, uint32_t rows, uint32_t threads, uint8_t* memory) {
  lay_out(model, rows, threads, memory, &workspace_);
}

void Scratch::use_own(const ModelSpec& model, uint32_t threads) {
  lay_out(model, own_rows_, threads, memory_.data() + logits_bytes(model, own_rows_), &workspace_);
}

}  // namespace smoe
