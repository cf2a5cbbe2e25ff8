// Attention over one tile of keys and values, several queries a pass, so that a key is read and widened once for all of
// them. Written over the sixteen-lane vocabulary like lanes_kernels.h, and included after it. What is computed for one
// query does not depend on which others share the pass: a score is one sixteen-lane sum over ascending dimensions, the
// sum of exponentials goes over sixteen lanes by the key's index in the tile, and values are added key by key.

// A row of keys or values as it lies in the cache.
struct RowF32 {
  static F get(const uint8_t* row, size_t d) { return load(reinterpret_cast<const float*>(row) + d); }
  static F get(const uint8_t* row, size_t d, size_t n) { return load(reinterpret_cast<const float*>(row) + d, n); }
};
struct RowF16 {
  static F get(const uint8_t* row, size_t d) { return widen_f16(load_16(reinterpret_cast<const uint16_t*>(row) + d)); }
  static F get(const uint8_t* row, size_t d, size_t n) {
    return widen_f16(load_16(reinterpret_cast<const uint16_t*>(row) + d, n));
  }
};
struct RowKv8 {
  static F get(const uint8_t* row, size_t d) {
    const Kv8Block& block = reinterpret_cast<const Kv8Block*>(row)[d / Kv8Block::kValues];
    return mul(to_float(widen_i8(block.level + d % Kv8Block::kValues)), set_f16(block.scale));
  }
  static F get(const uint8_t* row, size_t d, size_t) { return get(row, d); }  // whole blocks only
};

// K keys times H queries, sixteen dimensions from d on, or the `left` ones that are the last.
template <class Row, bool Whole, int K, int H>
inline void add_dims(const uint8_t* keys, size_t row_bytes, const float* const* q, size_t d, size_t left,
                     F (&acc)[K * H]) {
  F key[K];
#pragma GCC unroll 16
  for (int k = 0; k < K; ++k) {
    const uint8_t* row = keys + static_cast<size_t>(k) * row_bytes;
    key[k] = Whole ? Row::get(row, d) : Row::get(row, d, left);
  }
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) {
    const F query = Whole ? load(q[h] + d) : load(q[h] + d, left);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) acc[k * H + h] = fma(key[k], query, acc[k * H + h]);
  }
}

// out[k * H + h] = q_h . key k
template <class Row, int K, int H>
inline void key_dots(const uint8_t* keys, size_t row_bytes, const float* const* q, size_t dim, float* out) {
  F acc[K * H];
#pragma GCC unroll 16
  for (int i = 0; i < K * H; ++i) acc[i] = set(0.0f);
  size_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) add_dims<Row, true, K, H>(keys, row_bytes, q, d, kLanes, acc);
  if (d < dim) add_dims<Row, false, K, H>(keys, row_bytes, q, d, dim - d, acc);
  store_sums(acc, out);
}

// scores[i * H + h] = q_h . k_i, not scaled yet.
template <class Row, int H>
void score_tile(const AttnTile& t, const float* const* q, float* scores) {
  constexpr int rows = H < kAttnSums ? H : kAttnSums, keys = kAttnSums / rows;
  size_t i = 0;
  for (; i + keys <= t.n; i += keys) {
    const uint8_t* at = t.keys + i * t.row_bytes;
    for (size_t b = 0; t.ahead != 0 && b < keys * t.row_bytes; b += 64) {
      __builtin_prefetch(at + t.ahead + b, 0, 2);
      __builtin_prefetch(t.values + i * t.row_bytes + t.ahead + b, 0, 2);
    }
    for (int h = 0; h < H; h += rows) key_dots<Row, keys, rows>(at, t.row_bytes, q + h, t.dim, scores + i * H + h);
  }
  for (; i < t.n; ++i)
    for (int h = 0; h < H; h += rows)
      key_dots<Row, 1, rows>(t.keys + i * t.row_bytes, t.row_bytes, q + h, t.dim, scores + i * H + h);
}

inline float larger(float a, float b) { return a > b ? a : b; }
inline float plus(float a, float b) { return a + b; }

// Sixteen lanes onto the first `lanes` of them, halves onto halves.
template <float (*Op)(float, float)>
inline void fold_lanes(F x, int lanes, float* out) {
  alignas(64) float all[kLanes];
  store(all, x);
  for (int half = kLanes / 2; half >= lanes; half /= 2)
    for (int i = 0; i < half; ++i) all[i] = Op(all[i], all[i + half]);
  std::memcpy(out, all, static_cast<size_t>(lanes) * sizeof(float));
}

// Scores to exponentials under the new maxima; shrink[h] is what was gathered so far has to be multiplied by.
template <int H>
void soften(const AttnTile& t, float* scores, float* shrink, float* max_of, float* sum_of) {
  constexpr size_t group = kLanes * H;  // of scores: sixteen keys
  const size_t end = (t.n + kLanes - 1) / kLanes * group;
  for (size_t i = t.n * H; i < end; ++i) scores[i] = -INFINITY;  // their exponentials are zero
  const F scale = set(t.scale);
  F top[H];
#pragma GCC unroll 8
  for (int j = 0; j < H; ++j) top[j] = set(-INFINITY);
  for (size_t i = 0; i < end; i += group) {
#pragma GCC unroll 8
    for (int j = 0; j < H; ++j) {
      float* at = scores + i + static_cast<size_t>(j) * kLanes;
      const F x = mul(load(at), scale);
      store(at, x);
      top[j] = max(top[j], x);
    }
  }
#pragma GCC unroll 8
  for (int j = 1; j < H; ++j) top[0] = max(top[0], top[j]);
  float best[H], part[H];
  fold_lanes<larger>(top[0], H, best);
  alignas(64) float every[kLanes], before[kLanes] = {};
  for (int h = 0; h < H; ++h) {
    before[h] = max_of[h];
    max_of[h] = larger(max_of[h], best[h]);
  }
  for (size_t i = 0; i < kLanes; ++i) every[i] = max_of[i % H];
  const F highest = load(every);
  store(before, exp_lanes(sub(load(before), highest)));
  std::memcpy(shrink, before, H * sizeof(float));
  F total[H];
#pragma GCC unroll 8
  for (int j = 0; j < H; ++j) total[j] = set(0.0f);
  for (size_t i = 0; i < end; i += group) {
#pragma GCC unroll 8
    for (int j = 0; j < H; ++j) {
      float* at = scores + i + static_cast<size_t>(j) * kLanes;
      const F e = exp_lanes(sub(load(at), highest));
      store(at, e);
      total[j] = add(total[j], e);
    }
  }
#pragma GCC unroll 4
  for (int half = H / 2; half >= 1; half /= 2) {
#pragma GCC unroll 4
    for (int j = 0; j < half; ++j) total[j] = add(total[j], total[j + half]);
  }
  fold_lanes<plus>(total[0], H, part);
  for (int h = 0; h < H; ++h) sum_of[h] = sum_of[h] * shrink[h] + part[h];
}

// R queries, V registers of their values from dimension d on. p[i * stride + h].
template <class Row, int R, int V>
inline void add_values(const AttnTile& t, const float* p, size_t stride, const float* shrink, size_t d, float* out) {
  F acc[R][V];
#pragma GCC unroll 8
  for (int h = 0; h < R; ++h) {
    const F factor = set(shrink[h]);
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j)
      acc[h][j] = mul(load(out + static_cast<size_t>(h) * t.value_dim + d + static_cast<size_t>(j) * kLanes), factor);
  }
  const uint8_t* row = t.values;
  for (size_t i = 0; i < t.n; ++i, row += t.row_bytes, p += stride) {
    F value[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) value[j] = Row::get(row, d + static_cast<size_t>(j) * kLanes);
#pragma GCC unroll 8
    for (int h = 0; h < R; ++h) {
      const F weight = set(p[h]);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) acc[h][j] = fma(weight, value[j], acc[h][j]);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < R; ++h) {
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j)
      store(out + static_cast<size_t>(h) * t.value_dim + d + static_cast<size_t>(j) * kLanes, acc[h][j]);
  }
}

template <class Row, int R>
void value_tile(const AttnTile& t, const float* p, size_t stride, const float* shrink, float* out) {
  constexpr int wide = kAttnSums / R < 8 ? kAttnSums / R : 8;
  size_t d = 0;
  for (; d + wide * kLanes <= t.value_dim; d += wide * kLanes) add_values<Row, R, wide>(t, p, stride, shrink, d, out);
  for (; d + kLanes <= t.value_dim; d += kLanes) add_values<Row, R, 1>(t, p, stride, shrink, d, out);
  if (d == t.value_dim) return;
  const size_t left = t.value_dim - d;
  for (int h = 0; h < R; ++h) {
    float* at = out + static_cast<size_t>(h) * t.value_dim + d;
    F acc = mul(load(at, left), set(shrink[h]));
    for (size_t i = 0; i < t.n; ++i)
      acc = fma(set(p[i * stride + static_cast<size_t>(h)]), Row::get(t.values + i * t.row_bytes, d, left), acc);
    store(at, acc, left);
  }
}

template <class Row, int H>
void fold_queries(const AttnTile& t, const float* const* q, float* scores, float* out, float* max_of, float* sum_of) {
  constexpr int rows = H < kAttnSums ? H : kAttnSums;
  float shrink[H];
  score_tile<Row, H>(t, q, scores);
  soften<H>(t, scores, shrink, max_of, sum_of);
  for (int h = 0; h < H; h += rows)
    value_tile<Row, rows>(t, scores + h, H, shrink + h, out + static_cast<size_t>(h) * t.value_dim);
}

template <class Row>
void fold_tile(AttnTile t, const float* const* q, size_t queries, float* scores, float* out, float* max_of,
               float* sum_of) {
  while (queries > 0) {
    const size_t n = queries >= 8 ? 8 : queries >= 4 ? 4 : queries >= 2 ? 2 : 1;
    if (n == 8) fold_queries<Row, 8>(t, q, scores, out, max_of, sum_of);
    if (n == 4) fold_queries<Row, 4>(t, q, scores, out, max_of, sum_of);
    if (n == 2) fold_queries<Row, 2>(t, q, scores, out, max_of, sum_of);
    if (n == 1) fold_queries<Row, 1>(t, q, scores, out, max_of, sum_of);
    queries -= n, q += n, out += n * t.value_dim, max_of += n, sum_of += n;
    t.ahead = 0;  // what comes next has been asked for
  }
}

void attn_fold(const AttnTile& t, const float* const* q, size_t queries, float* scores, float* out, float* max_of,
               float* sum_of) {
  switch (t.rows) {
    case KvRows::f32:
      return fold_tile<RowF32>(t, q, queries, scores, out, max_of, sum_of);
    case KvRows::f16:
      return fold_tile<RowF16>(t, q, queries, scores, out, max_of, sum_of);
    case KvRows::kv8:
      return fold_tile<RowKv8>(t, q, queries, scores, out, max_of, sum_of);
  }
}
