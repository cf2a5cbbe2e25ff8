#include "blocks/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace smoe {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr size_t kDecodeFrom = 16;  // queries that read a tile of 8-bit rows, above which it is decoded first

// A worker's view of its scratch: decoded tiles, scores, and the softmax state of each (query, head of the slice).
struct TileState {
  float *keys, *values, *scores, *out, *max, *sum;
  TileState(float* memory, size_t dim, size_t states)
      : keys(memory),
        values(keys + kKeyTile * dim),
        scores(values + kKeyTile * dim),
        out(scores + attn_score_floats(kKeyTile)),
        max(out + states * dim),
        sum(max + states) {}
};

KvRows rows_of(KvType type) {
  return type == KvType::f32 ? KvRows::f32 : type == KvType::q8 ? KvRows::kv8 : KvRows::f16;
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

// Heads [h0, h0 + heads) of one kv head, for a block of queries that read its tiles together.
class Slice {
 public:
  Slice(const Compute& c, const Queries& s, const QueryBlock& block, size_t kv_head, size_t h0, size_t heads,
        float* memory)
      : c_(c),
        s_(s),
        block_(block),
        kv_(block.kv),
        kv_head_(kv_head),
        h0_(h0),
        heads_(heads),
        states_(block.n * heads),
        last_(block.position + block.n - 1),
        t_(memory, kv_.head_dim, kQueryTile * heads) {}

  void run() {
    std::fill_n(t_.out, states_ * s_.value_dim, 0.0f);
    std::fill_n(t_.max, states_, kMinusInfinity);
    std::fill_n(t_.sum, states_, 0.0f);
    for (size_t state = 0; state < states_; ++state)
      q_[state] = s_.q + ((block_.row + state / heads_) * s_.heads + h0_ + state % heads_) * kv_.head_dim;
    const uint64_t oldest = kv_.oldest(block_.position);
    for (uint64_t tile = oldest / kKeyTile * kKeyTile; tile <= last_; tile += kKeyTile)
      fold(std::max(tile, oldest), std::min(tile + kKeyTile - 1, last_));
    for (size_t state = 0; state < states_; ++state) write(state);
  }

 private:
  // Keys [lo, hi] of one tile: all queries at once where all of them see it whole.
  void fold(uint64_t lo, uint64_t hi) {
    AttnTile tile{rows_of(kv_.type),
                  kv_.key(kv_head_, lo),
                  kv_.value(kv_head_, lo),
                  0,
                  kv_.row_bytes(),
                  kv_.head_dim,
                  s_.value_dim,
                  s_.scale,
                  0};
    if (hi < last_ && (hi + 1) % kv_.capacity != 0) tile.ahead = (hi + 1 - lo) * tile.row_bytes;
    // 8-bit rows are decoded once where many read them.
    if (tile.rows == KvRows::kv8 && states_ > kDecodeFrom) decode(hi - lo + 1, &tile);
    if (kv_.oldest(last_) <= lo && hi <= block_.position) return fold(tile, lo, lo, hi, 0, states_);
    for (size_t i = 0; i < block_.n; ++i) {
      const uint64_t p = block_.position + i, from = std::max(lo, kv_.oldest(p)), to = std::min(hi, p);
      if (from <= to) fold(tile, lo, from, to, i * heads_, heads_);
    }
  }

  // Keys [from, to] of a tile that begins at `lo`, into the states [first, first + count).
  void fold(AttnTile tile, uint64_t lo, uint64_t from, uint64_t to, size_t first, size_t count) {
    tile.keys += (from - lo) * tile.row_bytes;
    tile.values += (from - lo) * tile.row_bytes;
    tile.n = to - from + 1;
    c_.kernels->attn_fold(tile, q_ + first, count, t_.scores, t_.out + first * s_.value_dim, t_.max + first,
                          t_.sum + first);
  }

  void decode(size_t n, AttnTile* tile) {
    const bool same = kv_.keys == kv_.values;
    c_.kernels->kv8_to_f32_row(tile->keys, n * kv_.head_dim, t_.keys);
    if (!same) c_.kernels->kv8_to_f32_row(tile->values, n * kv_.head_dim, t_.values);
    tile->rows = KvRows::f32;
    tile->row_bytes = kv_.head_dim * sizeof(float);
    tile->keys = reinterpret_cast<const uint8_t*>(t_.keys);
    tile->values = reinterpret_cast<const uint8_t*>(same ? t_.keys : t_.values);
    tile->ahead = 0;
  }

  void write(size_t state) {
    const size_t head = h0_ + state % heads_;
    float* to = s_.out + (block_.row + state / heads_) * s_.out_row + head * s_.out_head;
    const float* from = t_.out + state * s_.value_dim;
    const float inverse = share_of(t_.max[state], t_.sum[state], s_.sinks == nullptr ? nullptr : s_.sinks + head);
    for (size_t d = 0; d < s_.value_dim; ++d) to[d] = from[d] * inverse;
  }

  const Compute& c_;
  const Queries& s_;
  const QueryBlock& block_;
  const KvLayer& kv_;
  const size_t kv_head_, h0_, heads_, states_;
  const uint64_t last_;
  TileState t_;
  const float* q_[kQueryTile * kHeadSlice];
};

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
    Slice(c, s, block, kv_head, kv_head * group + g0, std::min(slice, group - g0),
          ws.attn_worker + worker * ws.attn_worker_floats)
        .run();
  });
}

size_t attend_worker_floats(size_t head_dim, size_t group) {
  // Two decoded tiles, the scores of a pass, and for each query of a tile its running output, maximum and sum.
  const size_t states = kQueryTile * std::min(group, kHeadSlice);
  return (2 * kKeyTile * head_dim + attn_score_floats(kKeyTile) + states * (head_dim + 2) + 15) / 16 * 16;
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
