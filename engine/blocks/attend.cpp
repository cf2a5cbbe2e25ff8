#include "blocks/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace smoe {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr uint64_t kKeySpan = 1024;  // keys that are folded apart from those before them, anchored like tiles
constexpr size_t kDecodeFrom = 16;   // queries that read a tile of 8-bit rows, above which it is decoded first

// Of each (query, head) of a slice: what it has gathered, not divided by the sum, and its softmax's maximum and sum.
struct States {
  float *out, *max, *sum;
  static size_t floats(size_t states, size_t dim) { return states * (dim + 2); }
  States(float* memory, size_t dim, size_t states) : out(memory), max(out + states * dim), sum(max + states) {}
};

// States of slices that are held at once: fewer than four slices a thread are split, into two parts or more.
size_t span_states(size_t threads) { return 16 * threads; }

// A worker's view of its scratch: decoded tiles, scores, states of all keys and of one span.
struct WorkerScratch {
  float *keys, *values, *scores, *whole, *span;
  WorkerScratch(float* memory, size_t dim, size_t states)
      : keys(memory),
        values(keys + kKeyTile * dim),
        scores(values + kKeyTile * dim),
        whole(scores + attn_score_floats(kKeyTile)),
        span(whole + States::floats(states, dim)) {}
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

// Spans of keys that some query of the block sees.
struct SpanRange {
  uint64_t begin, end;
};
SpanRange spans_of(const QueryBlock& block) {
  return {block.kv.oldest(block.position) / kKeySpan, (block.position + block.n - 1) / kKeySpan + 1};
}

// Heads [h0, h0 + heads) of one kv head, for a block of queries that read its tiles together. Keys are folded span by
// span, each from nothing, and the spans' states merged in order: so spans may be computed apart.
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
        t_(memory, kv_.head_dim, kQueryTile * heads) {
    for (size_t state = 0; state < states_; ++state)
      q_[state] = s_.q + ((block_.row + state / heads_) * s_.heads + h0_ + state % heads_) * kv_.head_dim;
  }

  void run() {
    const States whole = states(t_.whole), one = states(t_.span);
    const SpanRange spans = spans_of(block_);
    span(spans.begin, whole);
    for (uint64_t i = spans.begin + 1; i < spans.end; ++i) {
      span(i, one);
      merge(one, whole);
    }
    write(whole);
  }

  States states(float* memory) const { return {memory, s_.value_dim, states_}; }

  // What the keys of one span make of the queries.
  void span(uint64_t index, States to) {
    std::fill_n(to.out, states_ * s_.value_dim, 0.0f);
    std::fill_n(to.max, states_, kMinusInfinity);
    std::fill_n(to.sum, states_, 0.0f);
    const uint64_t oldest = std::max(kv_.oldest(block_.position), index * kKeySpan);
    const uint64_t last = std::min(last_, index * kKeySpan + kKeySpan - 1);
    for (uint64_t tile = oldest / kKeyTile * kKeyTile; tile <= last; tile += kKeyTile)
      fold(std::max(tile, oldest), std::min(tile + kKeyTile - 1, last), to);
  }

  void merge(States from, States into) const {
    for (size_t i = 0; i < states_; ++i) {
      if (from.sum[i] == 0) continue;  // it sees nothing of the span
      float factors[2] = {into.max[i], from.max[i]};
      into.max[i] = std::max(factors[0], factors[1]);
      c_.kernels->exp_sum(factors, 2, into.max[i]);
      into.sum[i] = into.sum[i] * factors[0] + from.sum[i] * factors[1];
      float* out = into.out + i * s_.value_dim;
      const float* add = from.out + i * s_.value_dim;
      for (size_t d = 0; d < s_.value_dim; ++d) out[d] = out[d] * factors[0] + add[d] * factors[1];
    }
  }

  void write(States from) const {
    for (size_t state = 0; state < states_; ++state) {
      const size_t head = h0_ + state % heads_;
      float* to = s_.out + (block_.row + state / heads_) * s_.out_row + head * s_.out_head;
      const float* sink = s_.sinks == nullptr ? nullptr : s_.sinks + head;
      const float inverse = share_of(from.max[state], from.sum[state], sink);
      for (size_t d = 0; d < s_.value_dim; ++d) to[d] = from.out[state * s_.value_dim + d] * inverse;
    }
  }

 private:
  // Keys [lo, hi] of one tile: all queries at once where all of them see it whole.
  void fold(uint64_t lo, uint64_t hi, States to) {
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
    if (kv_.oldest(last_) <= lo && hi <= block_.position) return fold(tile, lo, lo, hi, 0, states_, to);
    for (size_t i = 0; i < block_.n; ++i) {
      const uint64_t p = block_.position + i, from = std::max(lo, kv_.oldest(p)), until = std::min(hi, p);
      if (from <= until) fold(tile, lo, from, until, i * heads_, heads_, to);
    }
  }

  // Keys [from, until] of a tile that begins at `lo`, into the states [first, first + count).
  void fold(AttnTile tile, uint64_t lo, uint64_t from, uint64_t until, size_t first, size_t count, States to) {
    tile.keys += (from - lo) * tile.row_bytes;
    tile.values += (from - lo) * tile.row_bytes;
    tile.n = until - from + 1;
    c_.kernels->attn_fold(tile, q_ + first, count, t_.scores, to.out + first * s_.value_dim, to.max + first,
                          to.sum + first);
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

  const Compute& c_;
  const Queries& s_;
  const QueryBlock& block_;
  const KvLayer& kv_;
  const size_t kv_head_, h0_, heads_, states_;
  const uint64_t last_;
  const WorkerScratch t_;
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

// The slices of a call: its blocks of queries times its kv heads, and these cut where many heads share one.
class Call {
 public:
  Call(const Compute& c, const Queries& s, Workspace& ws)
      : c_(c), s_(s), ws_(ws), group_(s.heads / s.kv_heads), heads_(std::min(group_, kHeadSlice)) {
    slices_ = (group_ + heads_ - 1) / heads_;
    blocks_ = count_blocks(s);
  }

  void run() {
    const size_t units = blocks_ * s_.kv_heads * slices_;
    // One row a block: a decode step. Few and long slices leave workers idle, or waiting for the last one.
    if (blocks_ == s_.rows && units < 4 * c_.pool->size() && longest() > 1 && c_.pool->size() > 1) return split(units);
    c_.pool->run(units, [&](size_t unit, size_t worker) {
      const QueryBlock block = block_of(unit);
      slice(unit, block, worker).run();
    });
  }

 private:
  QueryBlock block_of(size_t unit) const { return find_block(s_, unit / (s_.kv_heads * slices_)); }

  Slice slice(size_t unit, const QueryBlock& block, size_t worker) const {
    const size_t kv_head = unit / slices_ % s_.kv_heads, g0 = unit % slices_ * heads_;
    return {c_,
            s_,
            block,
            kv_head,
            kv_head * group_ + g0,
            std::min(heads_, group_ - g0),
            ws_.attn_worker + worker * ws_.attn_worker_floats};
  }

  uint64_t longest() const {
    uint64_t most = 0;
    for (size_t i = 0; i < blocks_; ++i) {
      const SpanRange spans = spans_of(find_block(s_, i));
      most = std::max(most, spans.end - spans.begin);
    }
    return most;
  }

  // Spans are tasks, as many at once as there is room for their states.
  void split(size_t units) const {
    const size_t room = States::floats(heads_, s_.value_dim), step = span_states(c_.pool->size()) / units - 1;
    const auto place = [&](size_t unit, size_t i) { return ws_.attn_spans + (unit * (step + 1) + i) * room; };
    const uint64_t most = longest();
    for (uint64_t done = 0; done < most; done += step) {
      c_.pool->run(units * step, [&](size_t task, size_t worker) {
        const size_t unit = task / step, i = task % step;
        const QueryBlock block = block_of(unit);
        const uint64_t index = spans_of(block).begin + done + i;
        if (index >= spans_of(block).end) return;
        Slice one = slice(unit, block, worker);
        one.span(index, one.states(place(unit, done + i == 0 ? step : i)));
      });
      c_.pool->run(units, [&](size_t unit, size_t worker) {
        const QueryBlock block = block_of(unit);
        const uint64_t begin = spans_of(block).begin, end = spans_of(block).end;
        Slice one = slice(unit, block, worker);
        const States whole = one.states(place(unit, step));
        for (uint64_t i = done == 0 ? 1 : 0; i < step && begin + done + i < end; ++i)
          one.merge(one.states(place(unit, i)), whole);
        if (begin + done < end && begin + done + step >= end) one.write(whole);
      });
    }
  }

  const Compute& c_;
  const Queries& s_;
  Workspace& ws_;
  const size_t group_, heads_;
  size_t slices_, blocks_;
};

}  // namespace

void attend(const Compute& c, const Queries& s, Workspace& ws) { Call(c, s, ws).run(); }

size_t attend_worker_floats(size_t head_dim, size_t group) {
  const size_t states = States::floats(kQueryTile * std::min(group, kHeadSlice), head_dim);
  return (2 * kKeyTile * head_dim + attn_score_floats(kKeyTile) + 2 * states + 15) / 16 * 16;
}

size_t attend_span_floats(size_t head_dim, size_t group, size_t threads) {
  return threads > 1 ? span_states(threads) * States::floats(std::min(group, kHeadSlice), head_dim) : 0;
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
