#include "blocks/attention_gqa.h"

#include <algorithm>
#include <cmath>

namespace smoe {
namespace {

struct Angles {
  const float *cos, *sin;
  size_t half;
  bool interleaved;
};

void normalize_unit(float* x, size_t n, float eps) {
  float sum = 0;
  for (size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
  for (size_t i = 0; i < n; ++i) x[i] *= inverse;
}

void normalize_heads(const Compute& c, const AttentionSpec& spec, const float* norm, float eps, float* row,
                     size_t heads) {
  const size_t dim = spec.head_dim;
  if (spec.qk_norm == QkNorm::full) c.kernels->rms_norm(row, norm, heads * dim, eps, row);
  if (spec.qk_norm == QkNorm::head)
    for (size_t h = 0; h < heads; ++h) c.kernels->rms_norm(row + h * dim, norm, dim, eps, row + h * dim);
  if (spec.qk_norm == QkNorm::unit)
    for (size_t h = 0; h < heads; ++h) normalize_unit(row + h * dim, dim, eps);
}

// Long positions have sharper attention.
void heat(const AttentionSpec& spec, uint64_t position, float* q) {
  if (spec.temperature == 0) return;
  const float floors = std::floor(static_cast<float>(position + 1) / spec.temperature_floor);
  const float factor = std::log1p(floors) * spec.temperature + 1.0f;
  for (size_t i = 0; i < size_t{spec.heads} * spec.head_dim; ++i) q[i] *= factor;
}

// Norm, clip and rotation of one row of q or k: [heads, head_dim].
void finish_row(const Compute& c, const AttentionSpec& spec, const float* norm, float eps, float* row, size_t heads,
                const Angles& angles) {
  const size_t dim = spec.head_dim;
  if (!spec.norm_after_rope) normalize_heads(c, spec, norm, eps, row, heads);
  if (spec.qkv_clip > 0)
    for (size_t i = 0; i < heads * dim; ++i) row[i] = std::clamp(row[i], -spec.qkv_clip, spec.qkv_clip);
  for (size_t h = 0; h < heads; ++h) rotate(row + h * dim, angles.cos, angles.sin, angles.half, angles.interleaved);
  if (spec.norm_after_rope) normalize_heads(c, spec, norm, eps, row, heads);
}

}  // namespace

void attention_gqa(const Compute& c, const AttentionSpec& spec, const AttentionWeights& w, float norm_eps, Batch batch,
                   const RopeSpec& rope, Workspace& ws, Activations& input, size_t first) {
  const size_t T = input.rows(), dim = spec.head_dim, q_row = spec.heads * dim, kv_row = spec.kv_heads * dim;
  if (first < T) {
    linears(c, {{&w.q, ws.q, first}, {&w.k, ws.k, 0}, {&w.v, ws.v, 0}}, input);
  } else {
    linears(c, {{&w.k, ws.k, 0}, {&w.v, ws.v, 0}}, input);
  }
  if (first < T && spec.gated) linear(c, {w.gate, nullptr}, input, ws.attn_gate, first);

  c.pool->run(T, [&](size_t t, size_t) {
    const SequenceRows& sequence = sequence_of(batch, t);
    const KvLayer& kv = *sequence.kv;
    const uint64_t position = sequence.position_of(t);
    const Angles angles{ws.cos_of(spec.rope, t), ws.sin_of(spec.rope, t), rope.inv_freq.size(), rope.interleaved};
    float *k = ws.k + t * kv_row, *v = ws.v + t * kv_row;
    finish_row(c, spec, w.k_norm, norm_eps, k, spec.kv_heads, angles);
    if (spec.qkv_clip > 0)
      for (size_t i = 0; i < kv_row; ++i) v[i] = std::clamp(v[i], -spec.qkv_clip, spec.qkv_clip);
    for (size_t h = 0; h < spec.kv_heads; ++h) {
      store_row(c, kv, k + h * dim, kv.key(h, position));
      store_row(c, kv, v + h * dim, kv.value(h, position));
    }
    if (t < first) return;
    float* q = ws.q + (t - first) * q_row;
    finish_row(c, spec, w.q_norm, norm_eps, q, spec.heads, angles);
    heat(spec, position, q);
  });
  if (first == T) return;

  const size_t rows = T - first;
  attend(c, {batch, first, rows, spec.heads, spec.kv_heads, dim, spec.scale, ws.q, ws.attn, q_row, dim, w.sinks}, ws);
  if (spec.gated) {
    c.pool->run(rows, [&](size_t t, size_t) {
      const float* gate = ws.attn_gate + t * q_row;
      for (size_t i = 0; i < q_row; ++i) ws.attn[t * q_row + i] /= 1.0f + std::exp(-gate[i]);
    });
  }
  input.bind(ws.attn, rows, q_row);
  linear(c, w.o, input, ws.block_out);
}

}  // namespace smoe
