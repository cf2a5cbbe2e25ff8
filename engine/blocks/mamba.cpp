#include "blocks/mamba.h"

#include <algorithm>
#include <cmath>

namespace smoe {

void mamba(const Compute& c, const RecurrentSpec& spec, const MambaWeights& w, Batch batch, Workspace& ws,
           Activations& input, size_t first) {
  const size_t T = input.rows(), n = spec.values(), keys = spec.key_dim, chosen = spec.rank + 2 * keys;
  linear(c, w.in, input, ws.q);
  convolve(c, spec, w.conv, batch, {0, n}, true, ws.q, 2 * n, ws.v, n);
  input.bind(ws.v, T, n);
  linear(c, w.x, input, ws.recur_a);
  c.pool->run(T, [&](size_t t, size_t) {
    float *dt = ws.recur_a + t * chosen, *k = dt + spec.rank, *q = k + keys;
    c.kernels->rms_norm(dt, w.dt_norm, spec.rank, spec.eps, ws.recur_rank + t * spec.rank);
    c.kernels->rms_norm(k, w.k_norm, keys, spec.eps, k);
    c.kernels->rms_norm(q, w.q_norm, keys, spec.eps, q);
  });
  input.bind(ws.recur_rank, T, spec.rank);
  linear(c, w.dt, input, ws.recur_b);
  scan(c, spec, batch, [&](const Slab& s, size_t t, size_t) {
    const float *x = ws.v + t * n + s.first, *k = ws.recur_a + t * chosen + spec.rank;
    float *dt = ws.recur_b + t * n + s.first, update[kSlab];
    for (size_t i = 0; i < s.count; ++i) {
      dt[i] = softplus(dt[i]);
      update[i] = dt[i] * x[i];
    }
    float* y = t < first ? nullptr : ws.attn + (t - first) * n + s.first;
    c.kernels->selective_step(s.state, keys, s.count, w.rate + s.first, n, dt, k, update, k + keys, y);
    for (size_t i = 0; y != nullptr && i < s.count; ++i) y[i] += w.skip[s.first + i] * x[i];
  });
  if (first == T) return;
  c.pool->run(T - first, [&](size_t r, size_t) {
    float *gate = ws.q + (first + r) * 2 * n + n, *y = ws.attn + r * n;
    c.kernels->silu_mul(gate, y, n);
    std::copy_n(gate, n, y);
  });
  input.bind(ws.attn, T - first, n);
  linear(c, w.out, input, ws.block_out);
}

void mamba2(const Compute& c, const RecurrentSpec& spec, const Mamba2Weights& w, Batch batch, Workspace& ws,
            Activations& input, size_t first) {
  const size_t T = input.rows(), values = spec.values(), width = values + spec.channels() + spec.heads;
  linear(c, w.in, input, ws.q);
  float* const mixed = ws.q + values;
  convolve(c, spec, w.conv, batch, {0, spec.channels()}, true, mixed, width, mixed, width);
  scan(c, spec, batch, [&](const Slab& s, size_t t, size_t) {
    const float *row = mixed + t * width, *x = row + s.head * spec.value_dim + s.first;
    const float* k = row + values + s.head * spec.key_heads / spec.heads * spec.key_dim;
    const float dt = softplus(row[spec.channels() + s.head] + w.dt_bias[s.head]);
    float decay[kMaxStateKeys], update[kSlab];
    std::fill_n(decay, spec.key_dim, std::exp(w.rate[s.head] * dt));
    for (size_t i = 0; i < s.count; ++i) update[i] = dt * x[i];
    float* y = t < first ? nullptr : ws.attn + (t - first) * values + s.head * spec.value_dim + s.first;
    c.kernels->state_step(s.state, spec.key_dim, s.count, decay, k, update, k + spec.keys(), y);
    for (size_t i = 0; y != nullptr && i < s.count; ++i) y[i] += w.skip[s.head] * x[i];
  });
  if (first == T) return;
  const size_t group = values / spec.key_heads;
  c.pool->run(T - first, [&](size_t r, size_t) {
    float *gate = ws.q + (first + r) * width, *y = ws.attn + r * values;
    c.kernels->silu_mul(gate, y, values);
    for (size_t g = 0; g < values; g += group) c.kernels->rms_norm(gate + g, w.norm + g, group, spec.eps, y + g);
  });
  input.bind(ws.attn, T - first, values);
  linear(c, w.out, input, ws.block_out);
}

}  // namespace smoe
