// matmul_f32: plain matrices, and quantised ones in the float mode. Written once over the sixteen-lane vocabulary, like
// lanes_kernels.h, which comes first.

#include "kernels/strip_formats.h"

struct FloatCall {
  const float* x;
  size_t x_stride;
  const uint32_t* x_index;
  size_t tokens, row0, row1;
  float* y;
  size_t y_stride;
  const float* row(size_t t) const { return x + (x_index ? x_index[t] : t) * x_stride; }
};

// R rows from `row` times T tokens from t0
template <class Load, int R, int T>
void plain_tile(const Matrix& w, const FloatCall& call, size_t row, size_t t0) {
  const auto* data = reinterpret_cast<const typename Load::Element*>(w.data);
  const float* x[T];
  float out[R * T];
  for (size_t t = 0; t < T; ++t) x[t] = call.row(t0 + t);
  dot_tile<Load, R, T>(data + row * w.cols, w.cols, x, w.cols, out);
  for (size_t r = 0; r < R; ++r) {
    for (size_t t = 0; t < T; ++t) call.y[(t0 + t) * call.y_stride + row + r] = out[r * T + t];
  }
}

template <class Load, int R>
void plain_rows(const Matrix& w, const FloatCall& call, size_t row, size_t t0, size_t t1) {
  size_t t = t0;
  for (; t + kDotVectors <= t1; t += kDotVectors) plain_tile<Load, R, kDotVectors>(w, call, row, t);
  for (; t < t1; ++t) plain_tile<Load, R, 1>(w, call, row, t);
}

template <class Load>
void plain_matmul(const Matrix& w, const FloatCall& call) {
  constexpr size_t kBlock = 64;  // tokens whose values stay in the second-level cache while the rows pass by
  for (size_t t0 = 0; t0 < call.tokens; t0 += kBlock) {
    const size_t t1 = call.tokens - t0 < kBlock ? call.tokens : t0 + kBlock;
    size_t row = call.row0;
    if (t1 - t0 < kDotVectors) {  // few tokens: more rows at once keep the adders busy
      for (; row + kDotStreams <= call.row1; row += kDotStreams) {
        for (size_t t = t0; t < t1; ++t) plain_tile<Load, kDotStreams, 1>(w, call, row, t);
      }
    }
    for (; row + kDotRows <= call.row1; row += kDotRows) plain_rows<Load, kDotRows>(w, call, row, t0, t1);
    for (; row < call.row1; ++row) plain_rows<Load, 1>(w, call, row, t0, t1);
  }
}

// ---- panels decoded to floats: the float mode ----

// out[k][lane]: the values of one panel block, the same bits as decode_rows gives.
template <int Shift>
inline F field(I word, int32_t mask) {
  return to_float(bit_and(shift_right<Shift>(word), set(mask)));
}

inline void decode_q8_0(Encoding, const uint8_t* panel, float* out) {
  const F d = scales_at(panel), offset = set(128.0f);
  for (size_t g = 0; g < 8; ++g, out += 4 * kLanes) {
    const I word = load_int(panel + 32 + 64 * g);
    store(out, mul(d, sub(field<0>(word, 255), offset)));
    store(out + kLanes, mul(d, sub(field<8>(word, 255), offset)));
    store(out + 2 * kLanes, mul(d, sub(field<16>(word, 255), offset)));
    store(out + 3 * kLanes, mul(d, sub(field<24>(word, 255), offset)));
  }
}

// 32 columns of nibbles in four groups: scale * (nibble - offset) - min.
inline void decode_nibbles(const uint8_t* groups, F scale, F offset, F min, float* out) {
  for (size_t g = 0; g < 4; ++g) {
    const I word = load_int(groups + 64 * g);
    const F low[4] = {field<0>(word, 15), field<8>(word, 15), field<16>(word, 15), field<24>(word, 15)};
    const F high[4] = {field<4>(word, 15), field<12>(word, 15), field<20>(word, 15), field<28>(word, 15)};
    for (size_t i = 0; i < 4; ++i) {
      store(out + (4 * g + i) * kLanes, sub(mul(scale, sub(low[i], offset)), min));
      store(out + (16 + 4 * g + i) * kLanes, sub(mul(scale, sub(high[i], offset)), min));
    }
  }
}

inline void decode_q4_0(Encoding, const uint8_t* panel, float* out) {
  decode_nibbles(panel + 32, scales_at(panel), set(8.0f), set(0.0f), out);
}

inline void decode_q4_k(Encoding, const uint8_t* panel, float* out) {
  const F d = scales_at(panel), dmin = scales_at(panel + 32);
  const PanelScales s = scales_q4_k(panel);
  for (size_t i = 0; i < 8; ++i) {
    decode_nibbles(panel + 256 * (i + 1), mul(d, to_float(s.scale[i])), set(0.0f), mul(dmin, to_float(s.min[i])),
                   out + 32 * kLanes * i);
  }
}

inline void decode_q6_k(Encoding, const uint8_t* panel, float* out) {
  const F d = scales_at(panel), offset = set(32.0f);
  const I low = set(0x0f0f0f0f), high = set(0x30303030);
  for (size_t s = 0; s < 16; ++s) {
    const uint8_t* p = panel + 288 + 192 * s;
    const I a = load_int(p), b = load_int(p + 64), h = load_int(p + 128);
    const I group[4] = {bit_or(bit_and(a, low), bit_and(shift_left<4>(h), high)),
                        bit_or(bit_and(b, low), bit_and(shift_left<2>(h), high)),
                        bit_or(bit_and(shift_right<4>(a), low), bit_and(h, high)),
                        bit_or(bit_and(shift_right<4>(b), low), bit_and(shift_right<2>(h), high))};
    const F scale = mul(d, to_float(widen_i8(panel + 32 + 16 * s)));
    for (size_t g = 0; g < 4; ++g, out += 4 * kLanes) {
      store(out, mul(scale, sub(field<0>(group[g], 63), offset)));
      store(out + kLanes, mul(scale, sub(field<8>(group[g], 63), offset)));
      store(out + 2 * kLanes, mul(scale, sub(field<16>(group[g], 63), offset)));
      store(out + 3 * kLanes, mul(scale, sub(field<24>(group[g], 63), offset)));
    }
  }
}

template <bool Min>
inline F sub_min(F value, F min) {
  if constexpr (Min) return sub(value, min);
  return value;
}

// The strip of 32 columns whose step `Step` and those after it are left: scale * (level - offset) - min, the scales
// those of the sub-block.
template <class E, int Step = 0>
inline void decode_strip(const uint8_t* strip, const F* scale, const F* min, size_t sub_cols, float* out) {
  constexpr size_t kColumn = step_column<E::kBits>(Step);
  const I word = E::template level<Step>(strip);
  const F levels[4] = {field<0>(word, 255), field<8>(word, 255), field<16>(word, 255), field<24>(word, 255)};
  const F offset = set(static_cast<float>(E::kOffset)), s = scale[kColumn / sub_cols], m = min[kColumn / sub_cols];
  for (size_t i = 0; i < 4; ++i)
    store(out + (kColumn + i) * kLanes, sub_min<E::kMin>(mul(s, sub(levels[i], offset)), m));
  if constexpr (Step < 7) decode_strip<E, Step + 1>(strip, scale, min, sub_cols, out);
}

using DecodePanel = void (*)(Encoding e, const uint8_t* panel, float* out);

struct StripDecoders {  // see visit_strips
  template <class E>
  static void one_block(Encoding e, const uint8_t* panel, float* out) {
    const E format(e);
    const F scale = format.scale(panel), min = sub(set(0.0f), format.base(panel));
    for (size_t s = 0; s < format.strips(); ++s) {
      decode_strip<E>(panel + format.header() + 64 * E::kBits * s, &scale, &min, 32, out + 32 * kLanes * s);
    }
  }

  template <class E>
  static void super_block(Encoding, const uint8_t* panel, float* out) {
    const F d = scales_at(panel), dmin = E::kMin ? scales_at(panel + 32) : set(0.0f);
    SubScales scales;
    E::scales(panel, &scales);
    constexpr size_t kEach = 32 / E::kSub;
    for (size_t s = 0; s < 8; ++s) {
      F scale[2] = {}, min[2] = {};
      for (size_t i = 0; i < kEach; ++i) {
        scale[i] = mul(d, to_float(scales.scale[kEach * s + i]));
        if constexpr (E::kMin) min[i] = mul(dmin, to_float(scales.min[kEach * s + i]));
      }
      decode_strip<E>(panel + E::kStrips + 64 * E::kBits * s, scale, min, E::kSub, out + 32 * kLanes * s);
    }
  }

  template <class E>
  DecodePanel one() const {
    return one_block<E>;
  }
  template <class E>
  DecodePanel super() const {
    return super_block<E>;
  }
};

inline DecodePanel decode_panel(Encoding e) {
  switch (e) {
    case Encoding::q8_0:
      return decode_q8_0;
    case Encoding::q4_0:
      return decode_q4_0;
    case Encoding::q4_k:
      return decode_q4_k;
    case Encoding::q6_k:
      return decode_q6_k;
    default:
      return visit_strips(e, StripDecoders{});
  }
}

// acc[t] += the decoded block (n columns of sixteen rows) times token t's columns.
template <int T>
void block_times(const float* w, size_t n, const float* const* x, size_t k, F* acc) {
  F part[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) part[t] = set(0.0f);
  for (size_t i = 0; i < n; ++i) {
    const F row = load(w + i * kLanes);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) part[t] = fma(row, set(x[t][k + i]), part[t]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) acc[t] = add(acc[t], part[t]);
}

void panel_matmul_f32(const Matrix& w, const FloatCall& call) {
  constexpr size_t kTile = 16;
  const EncodingInfo& info = encoding_info(w.encoding);
  const DecodePanel decode = decode_panel(w.encoding);
  const size_t n = info.block_values, block = kPanelRows * info.block_bytes, blocks = w.cols / n;
  alignas(64) float values[kMaxBlockValues * kLanes];
  for (size_t row = call.row0; row < call.row1; row += kPanelRows) {
    const size_t count = call.row1 - row < kPanelRows ? call.row1 - row : kPanelRows;
    for (size_t t0 = 0; t0 < call.tokens; t0 += kTile) {
      const size_t tokens = call.tokens - t0 < kTile ? call.tokens - t0 : kTile;
      const float* x[kTile];
      F acc[kTile];
      for (size_t t = 0; t < tokens; ++t) {
        x[t] = call.row(t0 + t);
        acc[t] = set(0.0f);
      }
      const uint8_t* panel = w.data + row / kPanelRows * blocks * block;
      for (size_t b = 0; b < blocks; ++b, panel += block) {
        decode(w.encoding, panel, values);
        size_t t = 0;
        for (; t + 4 <= tokens; t += 4) block_times<4>(values, n, x + t, b * n, acc + t);
        for (; t < tokens; ++t) block_times<1>(values, n, x + t, b * n, acc + t);
      }
      for (size_t t = 0; t < tokens; ++t) store(call.y + (t0 + t) * call.y_stride + row, acc[t], count);
    }
  }
}

void matmul_f32(const Matrix& w, const float* x, size_t x_stride, const uint32_t* x_index, size_t tokens, size_t row0,
                size_t row1, float* y, size_t y_stride) {
  const FloatCall call = {x, x_stride, x_index, tokens, row0, row1, y, y_stride};
  switch (w.encoding) {
    case Encoding::f32:
      return plain_matmul<LoadF32>(w, call);
    case Encoding::f16:
      return plain_matmul<LoadF16>(w, call);
    case Encoding::bf16:
      return plain_matmul<LoadBf16>(w, call);
    default:
      break;
  }
  if (w.layout == Layout::panel16) return panel_matmul_f32(w, call);
  scalar_kernels().matmul_f32(w, x, x_stride, x_index, tokens, row0, row1, y, y_stride);
}
