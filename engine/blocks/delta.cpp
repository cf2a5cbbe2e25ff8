#include "blocks/delta.h"

#include <algorithm>
#include <cmath>

namespace smoe {
namespace {

// x to length `length`, of n values.
void normalize_length(const Compute& c, float* x, size_t n, float length) {
  float squares = 0;
  c.kernels->attn_scores(x, x, true, 1, n, 1.0f, &squares);
  const float factor = length / std::sqrt(squares + 1e-6f);
  for (size_t i = 0; i < n; ++i) x[i] *= factor;
}

// Everything that is made from the input: q, k, v in ws, beta in recur_b, the decay's logits in recur_a, the gate's in
// attn_gate.
void project(const Compute& c, const RecurrentSpec& spec, const DeltaWeights& w, Workspace& ws, Activations& input,
             size_t first) {
  const size_t T = input.rows();
  linear(c, w.q, input, ws.q);
  linear(c, w.k, input, ws.k);
  linear(c, w.v, input, ws.v);
  linear(c, w.beta, input, ws.recur_b);
  if (spec.rank == 0) {
    linear(c, w.decay, input, ws.recur_a);
    if (first < T) linear(c, w.gate, input, ws.attn_gate, first);
    return;
  }
  float* of_gate = ws.recur_rank + T * spec.rank;
  linear(c, w.decay_in, input, ws.recur_rank);
  if (first < T) linear(c, w.gate_in, input, of_gate);
  input.bind(ws.recur_rank, T, spec.rank);
  linear(c, w.decay, input, ws.recur_a);
  input.bind(of_gate, T, spec.rank);
  if (first < T) linear(c, w.gate, input, ws.attn_gate, first);
}

// Logits of one row become what they stand for: beta, the decay's factors, keys and queries of their lengths.
void finish_row(const Compute& c, const RecurrentSpec& spec, const DeltaWeights& w, Workspace& ws, size_t t) {
  float* beta = ws.recur_b + t * spec.heads;
  for (size_t h = 0; h < spec.heads; ++h) beta[h] = 1.0f / (1.0f + std::exp(-beta[h]));
  const size_t each = spec.channel_decay ? spec.key_dim : 1;
  float* decay = ws.recur_a + t * spec.heads * each;
  for (size_t h = 0; h < spec.heads; ++h)
    for (size_t i = 0; i < each; ++i) {
      float& d = decay[h * each + i];
      d = std::exp(w.rate[h] * softplus(d));
    }
  const float of_query = 1.0f / std::sqrt(static_cast<float>(spec.key_dim));
  for (size_t h = 0; h < spec.key_heads; ++h) {
    const size_t at = t * spec.keys() + h * spec.key_dim;
    normalize_length(c, ws.q + at, spec.key_dim, of_query);
    normalize_length(c, ws.k + at, spec.key_dim, 1.0f);
  }
}

void step(const Compute& c, const RecurrentSpec& spec, Workspace& ws, const Slab& slab, size_t t, size_t first) {
  const size_t at = t * spec.keys() + spec.key_head(slab.head) * spec.key_dim, values = spec.values();
  const size_t value = slab.head * spec.value_dim + slab.first;
  float decay[kMaxStateKeys], weight[kMaxStateKeys], update[kSlab] = {};
  if (spec.channel_decay) {
    std::copy_n(ws.recur_a + (t * spec.heads + slab.head) * spec.key_dim, spec.key_dim, decay);
  } else {
    std::fill_n(decay, spec.key_dim, ws.recur_a[t * spec.heads + slab.head]);
  }
  for (size_t i = 0; i < spec.key_dim; ++i) weight[i] = decay[i] * ws.k[at + i];
  c.kernels->attn_values(weight, slab.state, true, spec.key_dim, slab.count, update);  // what the state answers
  const float beta = ws.recur_b[t * spec.heads + slab.head], *v = ws.v + t * values + value;
  for (size_t i = 0; i < slab.count; ++i) update[i] = (v[i] - update[i]) * beta;
  c.kernels->state_step(slab.state, spec.key_dim, slab.count, decay, ws.k + at, update, ws.q + at,
                        t < first ? nullptr : ws.attn + (t - first) * values + value);
}

// The norm of each head, and the gate; the result is in attn_gate.
void gate_row(const Compute& c, const RecurrentSpec& spec, const DeltaWeights& w, Workspace& ws, size_t r) {
  float *y = ws.attn + r * spec.values(), *gate = ws.attn_gate + r * spec.values();
  for (size_t h = 0; h < spec.heads; ++h)
    c.kernels->rms_norm(y + h * spec.value_dim, w.norm, spec.value_dim, spec.eps, y + h * spec.value_dim);
  if (!spec.sigmoid_gate) return c.kernels->silu_mul(gate, y, spec.values());
  for (size_t i = 0; i < spec.values(); ++i) gate[i] = y[i] / (1.0f + std::exp(-gate[i]));
}

}  // namespace

void delta(const Compute& c, const RecurrentSpec& spec, const DeltaWeights& w, Batch batch, Workspace& ws,
           Activations& input, size_t first) {
  const size_t T = input.rows(), keys = spec.keys(), values = spec.values();
  project(c, spec, w, ws, input, first);
  convolve(c, spec, w.q_conv, batch, {0, keys}, true, ws.q, keys, ws.q, keys);
  convolve(c, spec, w.k_conv, batch, {keys, keys}, true, ws.k, keys, ws.k, keys);
  convolve(c, spec, w.v_conv, batch, {2 * keys, values}, true, ws.v, values, ws.v, values);
  c.pool->run(T, [&](size_t t, size_t) { finish_row(c, spec, w, ws, t); });
  scan(c, spec, batch, [&](const Slab& slab, size_t t, size_t) { step(c, spec, ws, slab, t, first); });
  if (first == T) return;
  c.pool->run(T - first, [&](size_t r, size_t) { gate_row(c, spec, w, ws, r); });
  input.bind(ws.attn_gate, T - first, values);
  linear(c, w.out, input, ws.block_out);
}

}  // namespace smoe
