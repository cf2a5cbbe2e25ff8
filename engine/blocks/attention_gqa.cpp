#include "blocks/attention_gqa.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace smoe {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Rotates one head in place; pairs value i with value i + half.
void rotate(float* head, const float* cos, const float* sin, size_t half) {
  for (size_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// Norm, clip and rotation of one row of q or k: [heads, head_dim].
void finish_row(const Compute& c, const AttentionSpec& spec, const float* norm, float eps, float* row, size_t heads,
                const float* cos, const float* sin, size_t half) {
  const size_t dim = spec.head_dim;
  if (spec.qk_norm == QkNorm::full) c.kernels->rms_norm(row, norm, heads * dim, eps, row);
  if (spec.qk_norm == QkNorm::head)
    for (size_t h = 0; h < heads; ++h) c.kernels->rms_norm(row + h * dim, norm, dim, eps, row + h * dim);
  if (spec.qkv_clip > 0)
    for (size_t i = 0; i < heads * dim; ++i) row[i] = std::clamp(row[i], -spec.qkv_clip, spec.qkv_clip);
  for (size_t h = 0; h < heads; ++h) rotate(row + h * dim, cos, sin, half);
}

void store(const Compute& c, const KvLayer& kv, const float* row, uint8_t* to) {
  if (kv.f32) {
    std::memcpy(to, row, kv.head_dim * sizeof(float));
  } else {
    c.kernels->f32_to_f16_row(row, kv.head_dim, reinterpret_cast<uint16_t*>(to));
  }
}

// A worker's view of its scratch: decoded tiles, scores, and the softmax state of each (query, head of the group).
struct TileState {
  float *keys, *values, *scores, *out, *max, *sum;
  TileState(float* memory, size_t dim, size_t states)
      : keys(memory),
        values(keys + kKeyTile * dim),
        scores(values + kKeyTile * dim),
        out(scores + kKeyTile),
        max(out + states * dim),
        sum(max + states) {}
};

void decode_tile(const Compute& c, const KvLayer& kv, const uint8_t* src, size_t n, float* dst) {
  c.kernels->f16_to_f32_row(reinterpret_cast<const uint16_t*>(src), n * kv.head_dim, dst);
}

// Folds keys [0, n) of a tile into one query's state.
void fold(const Compute& c, const float* q, const void* keys, const void* values, bool f32, size_t n, size_t dim,
          float scale, float* scores, float* out, float* max, float* sum) {
  c.kernels->attn_scores(q, keys, f32, n, dim, scale, scores);
  const float top = std::max(*max, c.kernels->max_value(scores, n));
  if (top > *max && *sum > 0) {
    const float shrink = std::exp(*max - top);
    *sum *= shrink;
    for (size_t d = 0; d < dim; ++d) out[d] *= shrink;
  }
  *max = top;
  *sum += c.kernels->exp_sum(scores, n, top);
  c.kernels->attn_values(scores, values, f32, n, dim, out);
}

struct Queries {
  const AttentionSpec& spec;
  const KvLayer& kv;
  const float* q;     // [rows, heads * head_dim]
  float* out;         // [rows, heads * head_dim]
  uint64_t position;  // of row 0
};

// All heads of one kv head's group, for the query rows [r0, r0 + n): each key tile is decoded once for all of them.
void attend(const Compute& c, const Queries& s, size_t kv_head, size_t r0, size_t n, float* memory) {
  const size_t dim = s.spec.head_dim, group = s.spec.heads / s.spec.kv_heads, stride = s.spec.heads * dim;
  TileState t(memory, dim, kQueryTile * group);
  std::fill_n(t.out, n * group * dim, 0.0f);
  std::fill_n(t.max, n * group, kMinusInfinity);
  std::fill_n(t.sum, n * group, 0.0f);
  const auto oldest = [&](uint64_t p) { return p + 1 > s.kv.window ? p + 1 - s.kv.window : 0; };
  const uint64_t first = s.position + r0, last = first + n - 1;
  const bool share = n * group >= 4 && !s.kv.f32;  // decoding a tile pays when several queries read it
  for (uint64_t tile = oldest(first) / kKeyTile * kKeyTile; tile <= last; tile += kKeyTile) {
    const uint64_t lo = std::max(tile, oldest(first)), hi = std::min(tile + kKeyTile - 1, last);
    if (share) {
      decode_tile(c, s.kv, s.kv.key(kv_head, lo), hi - lo + 1, t.keys);
      decode_tile(c, s.kv, s.kv.value(kv_head, lo), hi - lo + 1, t.values);
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t p = first + i, from = std::max(lo, oldest(p)), to = std::min(hi, p);
      if (from > to) continue;
      const void* keys = share ? static_cast<const void*>(t.keys + (from - lo) * dim) : s.kv.key(kv_head, from);
      const void* values = share ? static_cast<const void*>(t.values + (from - lo) * dim) : s.kv.value(kv_head, from);
      for (size_t g = 0; g < group; ++g) {
        const size_t state = i * group + g;
        fold(c, s.q + (r0 + i) * stride + (kv_head * group + g) * dim, keys, values, share || s.kv.f32, to - from + 1,
             dim, s.spec.scale, t.scores, t.out + state * dim, t.max + state, t.sum + state);
      }
    }
  }
  for (size_t i = 0; i < n; ++i)
    for (size_t g = 0; g < group; ++g) {
      const size_t state = i * group + g;
      float* to = s.out + (r0 + i) * stride + (kv_head * group + g) * dim;
      const float inverse = 1.0f / t.sum[state];
      for (size_t d = 0; d < dim; ++d) to[d] = t.out[state * dim + d] * inverse;
    }
}

}  // namespace

void attention_gqa(const Compute& c, const AttentionSpec& spec, const AttentionWeights& w, float norm_eps,
                   const KvLayer& kv, Workspace& ws, Activations& input, size_t half, uint64_t position, size_t first) {
  const size_t T = input.rows(), dim = spec.head_dim, q_row = spec.heads * dim, kv_row = spec.kv_heads * dim;
  linear(c, w.k, input, ws.k);
  linear(c, w.v, input, ws.v);
  if (first < T) linear(c, w.q, input, ws.q, first);

  const size_t rope_base = size_t{spec.rope} * ws.rows * ws.rope_half;
  c.pool->run(T, [&](size_t t, size_t) {
    const float* cos = ws.rope_cos + rope_base + t * ws.rope_half;
    const float* sin = ws.rope_sin + rope_base + t * ws.rope_half;
    float *k = ws.k + t * kv_row, *v = ws.v + t * kv_row;
    finish_row(c, spec, w.k_norm, norm_eps, k, spec.kv_heads, cos, sin, half);
    if (spec.qkv_clip > 0)
      for (size_t i = 0; i < kv_row; ++i) v[i] = std::clamp(v[i], -spec.qkv_clip, spec.qkv_clip);
    for (size_t h = 0; h < spec.kv_heads; ++h) {
      store(c, kv, k + h * dim, kv.key(h, position + t));
      store(c, kv, v + h * dim, kv.value(h, position + t));
    }
    if (t >= first) finish_row(c, spec, w.q_norm, norm_eps, ws.q + (t - first) * q_row, spec.heads, cos, sin, half);
  });
  if (first == T) return;

  const size_t rows = T - first, blocks = (rows + kQueryTile - 1) / kQueryTile;
  const Queries queries{spec, kv, ws.q, ws.attn, position + first};
  c.pool->run(blocks * spec.kv_heads, [&](size_t task, size_t worker) {
    const size_t r0 = task / spec.kv_heads * kQueryTile;
    attend(c, queries, task % spec.kv_heads, r0, std::min(kQueryTile, rows - r0),
           ws.attn_worker + worker * ws.attn_worker_floats);
  });
  input.bind(ws.attn, rows, q_row);
  linear(c, w.o, input, ws.block_out);
}

}  // namespace smoe
