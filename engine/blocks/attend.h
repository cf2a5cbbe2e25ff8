// Attention over the cache: each query against the keys it may see, online softmax over key tiles anchored at absolute
// positions, so that a query's result does not depend on how the prompt was cut into chunks, nor on how many threads
// share its keys. Shared by every block that keeps keys and values. Online softmax: Milakov & Gimelshein 2018, Dao et
// al. 2022; spans of keys computed apart: Dao et al. 2023.
#pragma once

#include "blocks/batch.h"
#include "blocks/linear.h"
#include "blocks/workspace.h"

namespace smoe {

// Queries of the batch's rows [first, first + rows): [rows, heads, head_dim], and where their results go: value_dim
// values of (row, head) at out + row * out_row + head * out_head, rows counted from `first`.
struct Queries {
  Batch batch;
  size_t first = 0, rows = 0;
  size_t heads = 0, kv_heads = 0, value_dim = 0;
  float scale = 0;
  const float* q = nullptr;
  float* out = nullptr;
  size_t out_row = 0, out_head = 0;
  const float* sinks = nullptr;  // [heads] logits without a value; null without
};

void attend(const Compute& c, const Queries& queries, Workspace& ws);

// Floats that one worker of attend() needs; group = heads / kv_heads.
size_t attend_worker_floats(size_t head_dim, size_t group);
// And that all of them together need for slices that are split: few heads, many keys.
size_t attend_span_floats(size_t head_dim, size_t group, size_t threads);

// Rotates the first 2 * half values of a head in place, in halves or in interleaved pairs.
void rotate(float* head, const float* cos, const float* sin, size_t half, bool interleaved);

// One row of keys or values, [kv.head_dim], into the cache.
void store_row(const Compute& c, const KvLayer& kv, const float* row, uint8_t* to);

}  // namespace smoe
