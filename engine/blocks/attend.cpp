#include "blocks/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace smoe {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A worker's view of its scratch: decoded tiles, scores, and the softmax state of each (query, head of the slice).
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
  if (kv.type == KvType::q8) return c.kernels->kv8_to_f32_row(src, n * kv.head_dim, dst);
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

// What a query's accumulated values are multiplied by: one over the softmax's sum, the sink's share in it.
float share_of(float max, float sum, const float* sink) {
  if (sink == nullptr) return 1.0f / sum;
  const float top = std::max(max, *sink), shrink = std::exp(max - top);
  return shrink / (sum * shrink + std::exp(*sink - top));
}

// Query rows of one sequence that share decoded tiles: [row, row + n), counted as Queries does, the first at
// `position`.
struct QueryBlock {
  const KvLayer& kv;
  uint64_t position;
  size_t row, n;
};

// Heads [h0, h0 + heads) of one kv head, for a block of queries: each key tile is decoded once for all of them.
void attend_slice(const Compute& c, const Queries& s, const QueryBlock& block, size_t kv_head, size_t h0, size_t heads,
                  float* memory) {
  const KvLayer& kv = block.kv;
  const size_t dim = kv.head_dim, stride = s.heads * dim, r0 = block.row, n = block.n;
  TileState t(memory, dim, kQueryTile * heads);
  std::fill_n(t.out, n * heads * dim, 0.0f);
  std::fill_n(t.max, n * heads, kMinusInfinity);
  std::fill_n(t.sum, n * heads, 0.0f);
  const uint64_t first = block.position, last = first + n - 1;
  // Decoding a tile pays when several queries read it; 8-bit rows are read no other way.
  const bool share = kv.type == KvType::q8 || (n * heads >= 4 && !kv.f32());
  const bool same = kv.keys == kv.values;
  for (uint64_t tile = kv.oldest(first) / kKeyTile * kKeyTile; tile <= last; tile += kKeyTile) {
    const uint64_t lo = std::max(tile, kv.oldest(first)), hi = std::min(tile + kKeyTile - 1, last);
    const float* shared_values = same ? t.keys : t.values;
    if (share) {
      decode_tile(c, kv, kv.key(kv_head, lo), hi - lo + 1, t.keys);
      if (!same) decode_tile(c, kv, kv.value(kv_head, lo), hi - lo + 1, t.values);
    }
    for (size_t i = 0; i < n; ++i) {
      const uint64_t p = first + i, from = std::max(lo, kv.oldest(p)), to = std::min(hi, p);
      if (from > to) continue;
      const void* keys = share ? static_cast<const void*>(t.keys + (from - lo) * dim) : kv.key(kv_head, from);
      const void* values =
          share ? static_cast<const void*>(shared_values + (from - lo) * dim) : kv.value(kv_head, from);
      for (size_t g = 0; g < heads; ++g) {
        const size_t state = i * heads + g;
        fold(c, s.q + (r0 + i) * stride + (h0 + g) * dim, keys, values, share || kv.f32(), to - from + 1, dim, s.scale,
             t.scores, t.out + state * dim, t.max + state, t.sum + state);
      }
    }
  }
  for (size_t i = 0; i < n; ++i)
    for (size_t g = 0; g < heads; ++g) {
      const size_t state = i * heads + g;
      float* to = s.out + (r0 + i) * s.out_row + (h0 + g) * s.out_head;
      const float inverse = share_of(t.max[state], t.sum[state], s.sinks == nullptr ? nullptr : s.sinks + h0 + g);
      for (size_t d = 0; d < s.value_dim; ++d) to[d] = t.out[state * dim + d] * inverse;
    }
}

// Blocks of queries that the rows of one sequence make, as far as they are asked for.
size_t blocks_of(const SequenceRows& sequence, const Queries& s, size_t* begin, size_t* end) {
  *begin = std::max(sequence.row, s.first);
  *end = std::min(sequence.row + sequence.rows, s.first + s.rows);
  return *begin < *end ? (*end - *begin + kQueryTile - 1) / kQueryTile : 0;
}

size_t count_blocks(const Queries& s) {
  size_t sum = 0, begin = 0, end = 0;
  for (const SequenceRows& sequence : s.batch) sum += blocks_of(sequence, s, &begin, &end);
  return sum;
}

QueryBlock find_block(const Queries& s, size_t index) {
  size_t begin = 0, end = 0;
  const SequenceRows* sequence = s.batch.data();
  for (size_t n; index >= (n = blocks_of(*sequence, s, &begin, &end)); ++sequence) index -= n;
  const size_t row = begin + index * kQueryTile;
  return {*sequence->kv, sequence->position_of(row), row - s.first, std::min(kQueryTile, end - row)};
}

}  // namespace

void attend(const Compute& c, const Queries& s, Workspace& ws) {
  const size_t group = s.heads / s.kv_heads, slice = std::min(group, kHeadSlice), slices = (group + slice - 1) / slice;
  c.pool->run(count_blocks(s) * s.kv_heads * slices, [&](size_t task, size_t worker) {
    const QueryBlock block = find_block(s, task / (s.kv_heads * slices));
    const size_t kv_head = task / slices % s.kv_heads, g0 = task % slices * slice;
    attend_slice(c, s, block, kv_head, kv_head * group + g0, std::min(slice, group - g0),
                 ws.attn_worker + worker * ws.attn_worker_floats);
  });
}

size_t attend_worker_floats(size_t head_dim, size_t group) {
  // Two decoded tiles, the scores of one query, and for each query of a tile its running output, maximum and sum.
  const size_t states = kQueryTile * std::min(group, kHeadSlice);
  return (2 * kKeyTile * head_dim + kKeyTile + states * (head_dim + 2) + 15) / 16 * 16;
}

void rotate(float* head, const float* cos, const float* sin, size_t half, bool interleaved) {
  const size_t step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
  for (size_t i = 0; i < half; ++i) {
    float *first = head + i * step, *second = first + other;
    const float a = *first, b = *second;
    *first = a * cos[i] - b * sin[i];
    *second = b * cos[i] + a * sin[i];
  }
}

void store_row(const Compute& c, const KvLayer& kv, const float* row, uint8_t* to) {
  if (kv.f32()) {
    std::memcpy(to, row, kv.head_dim * sizeof(float));
  } else if (kv.type == KvType::q8) {
    c.kernels->f32_to_kv8_row(row, kv.head_dim, to);
  } else {
    c.kernels->f32_to_f16_row(row, kv.head_dim, reinterpret_cast<uint16_t*>(to));
  }
}

}  // namespace smoe
