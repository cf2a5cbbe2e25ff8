#include "blocks/attention_mla.h"

#include <algorithm>

namespace smoe {
namespace {

class Latent {
 public:
  Latent(const Compute& c, const AttentionSpec& spec, const LatentWeights& w, Batch batch, const RopeSpec& rope,
         Workspace& ws)
      : c_(c),
        spec_(spec),
        w_(w),
        batch_(batch),
        rope_(rope),
        ws_(ws),
        q_row_(spec.heads * (spec.nope_dim + spec.rope_dim)) {}

  // The batch's rows into the caches.
  void append(Activations& input) {
    const size_t row = spec_.head_dim;
    linear(c_, w_.kv_a, input, ws_.k);
    c_.pool->run(input.rows(), [&](size_t t, size_t) {
      float* k = ws_.k + t * row;
      c_.kernels->rms_norm(k, w_.kv_a_norm, spec_.kv_rank, spec_.latent_eps, k);
      turn(k + spec_.kv_rank, t);
      const SequenceRows& sequence = sequence_of(batch_, t);
      store_row(c_, *sequence.kv, k, sequence.kv->key(0, sequence.position_of(t)));
    });
  }

  // ws.q [rows, heads, nope_dim + rope_dim] of the batch's rows from `first` on; the rotated part rotated.
  void queries(Activations& input, size_t first) {
    const size_t rows = input.rows() - first;
    if (spec_.q_rank > 0) {
      linear(c_, w_.q_a, input, ws_.q_latent, first);
      c_.pool->run(rows, [&](size_t t, size_t) {
        float* q = ws_.q_latent + t * spec_.q_rank;
        c_.kernels->rms_norm(q, w_.q_a_norm, spec_.q_rank, spec_.latent_eps, q);
      });
      input.bind(ws_.q_latent, rows, spec_.q_rank);
      linear(c_, w_.q_b, input, ws_.q);
    } else {
      linear(c_, w_.q_b, input, ws_.q, first);
    }
    c_.pool->run(rows, [&](size_t t, size_t) {
      for (size_t h = 0; h < spec_.heads; ++h) turn(query(t, h) + spec_.nope_dim, first + t);
    });
  }

  // ws.attn [row.., heads, v_dim] for `rows` queries from `row` on, counted from the batch's row `first`.
  void attend_rows(size_t first, size_t row, size_t rows) {
    into_latent(row, rows);
    const size_t rank = spec_.kv_rank;
    // Head after head: [heads, rows, kv_rank], so that a head's rows are a batch for v_up.
    const Queries queries{batch_,      first + row,  rows,           spec_.heads, 1,          rank,
                          spec_.scale, ws_.latent_q, ws_.latent_out, rank,        rows * rank};
    attend(c_, queries, ws_);
    multiply_heads(w_.v_up, ws_.latent_out, rank, rows, spec_.v_dim, 0, ws_.attn + row * spec_.heads * spec_.v_dim,
                   spec_.heads * spec_.v_dim);
  }

 private:
  float* query(size_t t, size_t h) const { return ws_.q + t * q_row_ + h * (spec_.nope_dim + spec_.rope_dim); }
  void turn(float* values, size_t t) const {
    rotate(values, ws_.cos_of(spec_.rope, t), ws_.sin_of(spec_.rope, t), rope_.inv_freq.size(), rope_.interleaved);
  }

  // ws.latent_q [rows, heads, kv_rank + rope_dim].
  void into_latent(size_t row, size_t rows) {
    const size_t nope = spec_.nope_dim, wide = spec_.head_dim;
    c_.pool->run(rows, [&](size_t t, size_t) {
      for (size_t h = 0; h < spec_.heads; ++h) {
        const float* q = query(row + t, h);
        std::copy_n(q, nope, ws_.nope_q + (h * rows + t) * nope);
        std::copy_n(q + nope, spec_.rope_dim, ws_.latent_q + (t * spec_.heads + h) * wide + spec_.kv_rank);
      }
    });
    multiply_heads(w_.k_up, ws_.nope_q, nope, rows, spec_.kv_rank, spec_.rope_dim, ws_.latent_q, spec_.heads * wide);
  }

  // For each head its own rows of w [heads * out, cols] times its own batch of x [heads, rows, cols]. Output i of head
  // h and row t goes to y[t * y_stride + h * (out + gap) + i].
  void multiply_heads(const Matrix& w, const float* x, size_t cols, size_t rows, size_t out, size_t gap, float* y,
                      size_t y_stride) {
    Activations batch(ws_.acts_32, ws_.acts_256);
    batch.bind(x, spec_.heads * rows, cols);
    const uint8_t* acts = batch.quantized(c_, c_.format(w));
    c_.pool->run(spec_.heads, [&](size_t h, size_t) {
      multiply(c_, w, batch, acts, nullptr, h * rows, rows, h * out, (h + 1) * out, y + h * gap, y_stride);
    });
  }

  const Compute& c_;
  const AttentionSpec& spec_;
  const LatentWeights& w_;
  const Batch batch_;
  const RopeSpec& rope_;
  Workspace& ws_;
  size_t q_row_;
};

}  // namespace

void attention_mla(const Compute& c, const AttentionSpec& spec, const LatentWeights& w, Batch batch,
                   const RopeSpec& rope, Workspace& ws, Activations& input, size_t first) {
  const size_t T = input.rows();
  Latent latent(c, spec, w, batch, rope, ws);
  latent.append(input);
  if (first == T) return;
  latent.queries(input, first);
  const size_t rows = T - first;
  for (size_t row = 0; row < rows; row += kLatentRows)
    latent.attend_rows(first, row, std::min(kLatentRows, rows - row));
  input.bind(ws.attn, rows, spec.heads * spec.v_dim);
  linear(c, w.o, input, ws.block_out);
}

}  // namespace smoe
