// The float kernels, written once over the sixteen-lane vocabulary of lanes_<isa>.h and included by each isa_<isa>.cpp
// inside its target region and unnamed namespace. Every reduction has one order whatever the number of tokens or rows:
// a sum is one sixteen-lane accumulator over ascending columns, then halves onto halves. So ISAs that include this
// agree bit for bit.

constexpr size_t kLanes = 16;

// e^x within 1.5 ulp for x in [-87.3, 88.3]; 0 below, about 2.3e38 above; NaN stays NaN. r = x - n ln 2 in two steps, a
// minimax polynomial of degree 6 on |r| <= ln 2 / 2 (relative error 3e-9 before rounding), times 2^n.
inline F exp_lanes(F x) {
  constexpr float kLowest = -87.33f, kHighest = 88.3f;
  const F clamped = min(set(kHighest), max(set(kLowest), x));
  const I n = round_int(mul(clamped, set(1.44269504f)));
  const F n_float = to_float(n);
  const F r = fnma(n_float, set(-2.12194440e-4f), fnma(n_float, set(0.693359375f), clamped));
  F p = set(0x1.6a23cep-10f);
  p = fma(p, r, set(0x1.123a20p-7f));
  p = fma(p, r, set(0x1.5558f2p-5f));
  p = fma(p, r, set(0x1.555492p-3f));
  p = fma(p, r, set(0x1.fffffcp-2f));
  p = fma(p, mul(r, r), add(r, set(1.0f)));
  const F power = as_float(shift_left<23>(add(n, set(127))));
  return zero_where_below(x, kLowest, mul(p, power));
}

float max_value(const float* x, size_t n) {
  F best = set(-INFINITY);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = max(best, load(x + i));
  float result = largest(best);
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

float exp_sum(float* x, size_t n, float highest) {
  F total = set(0.0f);
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t count = n - i < kLanes ? n - i : kLanes;
    F e = exp_lanes(sub(load(x + i, count), set(highest)));
    store(x + i, e, count);
    if (count < kLanes) e = load(x + i, count);  // the lanes past the end are zero
    total = add(total, e);
  }
  return sum(total);
}

void silu_mul(float* gate, const float* up, size_t n) {
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t count = n - i < kLanes ? n - i : kLanes;
    const F g = load(gate + i, count);
    const F s = div(g, add(set(1.0f), exp_lanes(sub(set(0.0f), g))));
    store(gate + i, mul(s, load(up + i, count)), count);
  }
}

void rms_norm(const float* x, const float* weight, size_t n, float eps, float* out) {
  F squares[4] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
  for (size_t i = 0; i < n; i += kLanes) {
    const F v = load(x + i, n - i < kLanes ? n - i : kLanes);
    F& s = squares[i / kLanes % 4];
    s = fma(v, v, s);
  }
  const float total = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const F inverse = set(1.0f / std::sqrt(total / static_cast<float>(n) + eps));
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t count = n - i < kLanes ? n - i : kLanes;
    store(out + i, mul(mul(load(x + i, count), inverse), load(weight + i, count)), count);
  }
}

void f32_to_f16_row(const float* x, size_t n, uint16_t* out) {
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t count = n - i < kLanes ? n - i : kLanes;
    store_f16(out + i, load(x + i, count), count);
  }
}

void f16_to_f32_row(const uint16_t* x, size_t n, float* out) {
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t count = n - i < kLanes ? n - i : kLanes;
    store(out + i, widen_f16(load_16(x + i, count)), count);
  }
}

// ---- rows of plain numbers ----

struct LoadF32 {
  using Element = float;
  static F get(const float* p) { return load(p); }
  static F get(const float* p, size_t n) { return load(p, n); }
};
struct LoadF16 {
  using Element = uint16_t;
  static F get(const uint16_t* p) { return widen_f16(load_16(p)); }
  static F get(const uint16_t* p, size_t n) { return widen_f16(load_16(p, n)); }
};
struct LoadBf16 {
  using Element = uint16_t;
  static F get(const uint16_t* p) { return widen_bf16(load_16(p)); }
  static F get(const uint16_t* p, size_t n) { return widen_bf16(load_16(p, n)); }
};

// R rows times T vectors, one accumulator for each pair. out[r * T + t].
template <class Load, int R, int T>
void dot_tile(const typename Load::Element* w, size_t w_stride, const float* const* x, size_t n, float* out) {
  F acc[R][T];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] = set(0.0f);
  }
  size_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    F row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename Load::Element* p = w + static_cast<size_t>(r) * w_stride + k;
      row[r] = Load::get(p);
      // One vector waits for memory: ask for the next tile's rows, whose pages the processor does not see coming.
      if (T == 1 && R > 1) __builtin_prefetch(p + R * w_stride, 0, 2);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const F v = load(x[t] + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][t] = fma(row[r], v, acc[r][t]);
    }
  }
  if (k < n) {
    for (int t = 0; t < T; ++t) {
      const F v = load(x[t] + k, n - k);
      for (int r = 0; r < R; ++r)
        acc[r][t] = fma(Load::get(w + static_cast<size_t>(r) * w_stride + k, n - k), v, acc[r][t]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) out[r * T + t] = sum(acc[r][t]);
  }
}

// ---- attention ----

template <class Load>
void scores_of(const float* q, const typename Load::Element* k, size_t n, size_t dim, float scale, float* scores) {
  size_t i = 0;
  float out[kDotStreams];
  for (; i + kDotStreams <= n; i += kDotStreams) {
    dot_tile<Load, kDotStreams, 1>(k + i * dim, dim, &q, dim, out);
    for (size_t j = 0; j < kDotStreams; ++j) scores[i + j] = scale * out[j];
  }
  for (; i < n; ++i) {
    dot_tile<Load, 1, 1>(k + i * dim, dim, &q, dim, out);
    scores[i] = scale * out[0];
  }
}

void attn_scores(const float* q, const void* k, bool kv_f32, size_t n, size_t dim, float scale, float* scores) {
  if (kv_f32) return scores_of<LoadF32>(q, static_cast<const float*>(k), n, dim, scale, scores);
  scores_of<LoadF16>(q, static_cast<const uint16_t*>(k), n, dim, scale, scores);
}

// V registers of acc at once, every value row in order.
template <class Load, int V>
void weighted_sum(const float* p, const typename Load::Element* v, size_t n, size_t dim, float* acc) {
  F a[V];
#pragma GCC unroll 8
  for (int j = 0; j < V; ++j) a[j] = load(acc + static_cast<size_t>(j) * kLanes);
  for (size_t i = 0; i < n; ++i, v += dim) {
    const F weight = set(p[i]);
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) a[j] = fma(weight, Load::get(v + static_cast<size_t>(j) * kLanes), a[j]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < V; ++j) store(acc + static_cast<size_t>(j) * kLanes, a[j]);
}

template <class Load>
void values_of(const float* p, const typename Load::Element* v, size_t n, size_t dim, float* acc) {
  size_t d = 0;
  for (; d + 8 * kLanes <= dim; d += 8 * kLanes) weighted_sum<Load, 8>(p, v + d, n, dim, acc + d);
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) weighted_sum<Load, 4>(p, v + d, n, dim, acc + d);
  for (; d + kLanes <= dim; d += kLanes) weighted_sum<Load, 1>(p, v + d, n, dim, acc + d);
  if (d == dim) return;
  F a = load(acc + d, dim - d);
  for (size_t i = 0; i < n; ++i) a = fma(set(p[i]), Load::get(v + i * dim + d, dim - d), a);
  store(acc + d, a, dim - d);
}

void attn_values(const float* p, const void* v, bool kv_f32, size_t n, size_t dim, float* acc) {
  if (kv_f32) return values_of<LoadF32>(p, static_cast<const float*>(v), n, dim, acc);
  values_of<LoadF16>(p, static_cast<const uint16_t*>(v), n, dim, acc);
}

// ---- recurrences: lane = channel or value, so that no sum crosses lanes ----

void conv_row(const float* const* x, const float* w, size_t w_stride, const float* bias, size_t taps, size_t n,
              bool silu, float* out) {
  for (size_t c = 0; c < n; c += kLanes) {
    const size_t count = n - c < kLanes ? n - c : kLanes;
    F sum = bias == nullptr ? set(0.0f) : load(bias + c, count);
    for (size_t j = 0; j < taps; ++j) sum = fma(load(w + j * w_stride + c, count), load(x[j] + c, count), sum);
    if (silu) sum = div(sum, add(set(1.0f), exp_lanes(sub(set(0.0f), sum))));
    store(out + c, sum, count);
  }
}

// V registers of values at once, every key in order.
template <int V>
void state_columns(float* state, size_t keys, size_t values, const float* decay, const float* k, const float* u,
                   const float* q, float* out) {
  F add_of[V], sums[V];
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) {
    add_of[j] = load(u + static_cast<size_t>(j) * kLanes);
    sums[j] = set(0.0f);
  }
  for (size_t i = 0; i < keys; ++i, state += values) {
    const F keep = set(decay[i]), key = set(k[i]), query = set(q[i]);
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      float* at = state + static_cast<size_t>(j) * kLanes;
      const F s = fma(key, add_of[j], mul(keep, load(at)));
      store(at, s);
      sums[j] = fma(query, s, sums[j]);
    }
  }
  if (out == nullptr) return;
#pragma GCC unroll 4
  for (int j = 0; j < V; ++j) store(out + static_cast<size_t>(j) * kLanes, sums[j]);
}

void state_step(float* state, size_t keys, size_t values, const float* decay, const float* k, const float* u,
                const float* q, float* out) {
  const auto at = [out](size_t v) { return out == nullptr ? nullptr : out + v; };
  size_t v = 0;
  for (; v + 4 * kLanes <= values; v += 4 * kLanes)
    state_columns<4>(state + v, keys, values, decay, k, u + v, q, at(v));
  for (; v + kLanes <= values; v += kLanes) state_columns<1>(state + v, keys, values, decay, k, u + v, q, at(v));
  if (v == values) return;
  const size_t count = values - v;
  const F add_of = load(u + v, count);
  F sums = set(0.0f);
  for (size_t i = 0; i < keys; ++i) {
    float* p = state + i * values + v;
    const F s = fma(set(k[i]), add_of, mul(set(decay[i]), load(p, count)));
    store(p, s, count);
    sums = fma(set(q[i]), s, sums);
  }
  if (out != nullptr) store(out + v, sums, count);
}

void selective_step(float* state, size_t keys, size_t values, const float* a, size_t a_stride, const float* dt,
                    const float* k, const float* u, const float* q, float* out) {
  for (size_t v = 0; v < values; v += kLanes) {
    const size_t count = values - v < kLanes ? values - v : kLanes;
    const F step = load(dt + v, count), add_of = load(u + v, count);
    F sums = set(0.0f);
    for (size_t i = 0; i < keys; ++i) {
      float* p = state + i * values + v;
      const F keep = exp_lanes(mul(step, load(a + i * a_stride + v, count)));
      const F s = fma(set(k[i]), add_of, mul(keep, load(p, count)));
      store(p, s, count);
      sums = fma(set(q[i]), s, sums);
    }
    if (out != nullptr) store(out + v, sums, count);
  }
}

// ---- activations ----

// The largest magnitude of n values (a multiple of 16) as the bits of a float: NaN and infinity sort above all else.
inline uint32_t largest_bits(const float* x, size_t n) {
  I amax = set(0);
  for (size_t k = 0; k < n; k += kLanes) amax = max(amax, bit_and(bits(load(x + k)), set(0x7fffffff)));
  return static_cast<uint32_t>(largest(amax));
}

// Levels of 16 values; returns their sum.
inline int32_t quantize_16(const float* x, F d, int8_t* q) {
  const I level = max(set(-127), min(set(127), round_int(div(load(x), d))));
  store_i8(q, level);
  return sum(level);
}

// d of a block of n values and its levels; the sum of each 16 into sums.
inline float quantize_block(const float* x, size_t n, int8_t* q, int32_t* sums) {
  const uint32_t amax = largest_bits(x, n);
  const float d = amax >= kNotFinite ? std::bit_cast<float>(kQuietNan) : std::bit_cast<float>(amax) / 127.0f;
  if (!(d > 0)) {  // all zero, or not finite
    std::memset(q, 0, n);
    for (size_t s = 0; s < n / kLanes; ++s) sums[s] = 0;
    return d;
  }
  const F divisor = set(d);
  for (size_t s = 0; s < n / kLanes; ++s) sums[s] = quantize_16(x + s * kLanes, divisor, q + s * kLanes);
  return d;
}

// ---- keys and values in 8 bits ----

void f32_to_kv8_row(const float* x, size_t n, uint8_t* out) {
  auto* block = reinterpret_cast<Kv8Block*>(out);
  for (size_t k = 0; k < n; k += Kv8Block::kValues, ++block) {
    block->scale = f32_to_f16(std::bit_cast<float>(largest_bits(x + k, Kv8Block::kValues)) / 127.0f);
    const float scale = f16_to_f32(block->scale);
    if (!(scale > 0) || !std::isfinite(scale)) {
      std::memset(block->level, 0, sizeof(block->level));
      continue;
    }
    const F divisor = set(scale);
    for (size_t i = 0; i < Kv8Block::kValues; i += kLanes) quantize_16(x + k + i, divisor, block->level + i);
  }
}

void kv8_to_f32_row(const uint8_t* x, size_t n, float* out) {
  const auto* block = reinterpret_cast<const Kv8Block*>(x);
  for (size_t k = 0; k < n; k += Kv8Block::kValues, ++block) {
    const F scale = set(f16_to_f32(block->scale));
    for (size_t i = 0; i < Kv8Block::kValues; i += kLanes)
      store(out + k + i, mul(to_float(widen_i8(block->level + i)), scale));
  }
}

inline void quantize_32(const float* x, size_t cols, Act32* out) {
  for (size_t k = 0; k < cols; k += 32, ++out) {
    int32_t sums[2];
    out->d = quantize_block(x + k, 32, out->q, sums);
    out->start128 = -128 * (sums[0] + sums[1]);
    out->start8 = -8 * (sums[0] + sums[1]);
    out->start16 = -16 * (sums[0] + sums[1]);
  }
}

inline void quantize_256(const float* x, size_t cols, Act256* out) {
  for (size_t k = 0; k < cols; k += 256, ++out) {
    int32_t sums[16];
    out->d = quantize_block(x + k, 256, out->q, sums);
    for (size_t s = 0; s < 16; ++s) {
      out->sum16[s] = static_cast<int16_t>(sums[s]);
      out->start32[s] = -32 * sums[s];
    }
    for (size_t s = 0; s < 8; ++s) out->sum32[s] = static_cast<int16_t>(sums[2 * s] + sums[2 * s + 1]);
    std::memset(out->zero, 0, sizeof(out->zero));
  }
}

void quantize_act(ActFormat f, const float* x, size_t tokens, size_t cols, size_t x_stride, uint8_t* out) {
  for (size_t t = 0; t < tokens; ++t, x += x_stride, out += act_row_bytes(f, cols)) {
    if (f == ActFormat::q8_32) quantize_32(x, cols, reinterpret_cast<Act32*>(out));
    if (f == ActFormat::q8_256) quantize_256(x, cols, reinterpret_cast<Act256*>(out));
  }
}
