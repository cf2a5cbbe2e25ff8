// Sixteen lanes of float32 or int32 in four 128-bit registers. The vocabulary of lanes_kernels.h. Included inside the
// unnamed namespace of isa_neon.cpp and isa_neon_dot.cpp.

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct H {  // sixteen 16-bit numbers
  uint16x8_t v[2];
};

constexpr int kDotRows = 2, kDotVectors = 4, kDotStreams = 4;
constexpr int kAttnSums = 4;  // keys (or registers of values) times queries of lanes_queries.h

template <class R, class Op>
inline R each(Op op) {
  return {op(0), op(1), op(2), op(3)};
}

inline F set(float x) {
  return each<F>([&](int) { return vdupq_n_f32(x); });
}
inline F load(const float* p) {
  return each<F>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline F load(const float* p, size_t n) {
  if (n >= 16) return load(p);
  float whole[16] = {};
  std::memcpy(whole, p, n * sizeof(float));
  return load(whole);
}
inline void store(float* p, F x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline void store(float* p, F x, size_t n) {
  if (n >= 16) return store(p, x);
  float whole[16];
  store(whole, x);
  std::memcpy(p, whole, n * sizeof(float));
}
inline H load_16(const uint16_t* p) { return {vld1q_u16(p), vld1q_u16(p + 8)}; }
inline H load_16(const uint16_t* p, size_t n) {
  uint16_t whole[16] = {};
  std::memcpy(whole, p, n * sizeof(uint16_t));
  return load_16(whole);
}
inline uint16x4_t quarter(H h, int i) { return i % 2 == 0 ? vget_low_u16(h.v[i / 2]) : vget_high_u16(h.v[i / 2]); }
inline F widen_f16(H h) {
  return each<F>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(quarter(h, i))); });
}
inline F set_f16(uint16_t h) {
  const float32x4_t x = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h)));
  return {{x, x, x, x}};
}
inline F widen_bf16(H h) {
  return each<F>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(quarter(h, i), 16)); });
}
inline void store_f16(uint16_t* p, F x, size_t n) {
  uint16_t whole[16];
  for (int i = 0; i < 4; ++i) vst1_u16(whole + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
  std::memcpy(p, whole, n * sizeof(uint16_t));
}

inline F add(F x, F y) {
  return each<F>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline F sub(F x, F y) {
  return each<F>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline F mul(F x, F y) {
  return each<F>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline F div(F x, F y) {
  return each<F>([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
inline F fma(F x, F y, F z) {  // x * y + z
  return each<F>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline F fnma(F x, F y, F z) {  // z - x * y
  return each<F>([&](int i) { return vfmsq_f32(z.v[i], x.v[i], y.v[i]); });
}
// y where either is NaN, as on the other processors.
inline float32x4_t lesser(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F min(F x, F y) {
  return each<F>([&](int i) { return lesser(x.v[i], y.v[i]); });
}
inline F max(F x, F y) {
  return each<F>([&](int i) { return greater(x.v[i], y.v[i]); });
}
// y where not (x < limit), else 0.
inline F zero_where_below(F x, float limit, F y) {
  const float32x4_t edge = vdupq_n_f32(limit), zero = vdupq_n_f32(0.0f);
  return each<F>([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], edge), zero, y.v[i]); });
}

// Fixed order: halves added to halves, down to one.
inline float sum(F x) {
  const float32x4_t h4 = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t h2 = vadd_f32(vget_low_f32(h4), vget_high_f32(h4));
  return vget_lane_f32(h2, 0) + vget_lane_f32(h2, 1);
}
template <int N>
inline void store_sums(const F (&a)[N], float* out) {
  for (int i = 0; i < N; ++i) out[i] = sum(a[i]);
}
inline float largest(F x) {
  const float32x4_t h4 = greater(greater(x.v[0], x.v[2]), greater(x.v[1], x.v[3]));
  const float a = vgetq_lane_f32(h4, 0), b = vgetq_lane_f32(h4, 1), c = vgetq_lane_f32(h4, 2),
              d = vgetq_lane_f32(h4, 3);
  const float e = a > c ? a : c, f = b > d ? b : d;
  return e > f ? e : f;
}

inline I load_int(const void* p) {
  const auto* q = static_cast<const uint8_t*>(p);
  return each<I>([&](int i) { return vreinterpretq_s32_u8(vld1q_u8(q + 16 * i)); });
}
inline I widen_i8(const void* p) {
  const int8x16_t x = vld1q_s8(static_cast<const int8_t*>(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
          vmovl_s16(vget_high_s16(high))};
}
inline I set(int32_t x) {
  return each<I>([&](int) { return vdupq_n_s32(x); });
}
inline I bits(F x) {
  return each<I>([&](int i) { return vreinterpretq_s32_f32(x.v[i]); });
}
inline F as_float(I x) {
  return each<F>([&](int i) { return vreinterpretq_f32_s32(x.v[i]); });
}
inline I round_int(F x) {  // to nearest, ties to even
  return each<I>([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline F to_float(I x) {
  return each<F>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline I add(I x, I y) {
  return each<I>([&](int i) { return vaddq_s32(x.v[i], y.v[i]); });
}
inline I mul_add(I x, I y, I z) {  // x * y + z
  return each<I>([&](int i) { return vmlaq_s32(z.v[i], x.v[i], y.v[i]); });
}
inline I min(I x, I y) {
  return each<I>([&](int i) { return vminq_s32(x.v[i], y.v[i]); });
}
inline I max(I x, I y) {
  return each<I>([&](int i) { return vmaxq_s32(x.v[i], y.v[i]); });
}
inline I bit_and(I x, I y) {
  return each<I>([&](int i) { return vandq_s32(x.v[i], y.v[i]); });
}
inline I bit_or(I x, I y) {
  return each<I>([&](int i) { return vorrq_s32(x.v[i], y.v[i]); });
}
template <int N>
inline I shift_right(I x) {
  if constexpr (N == 0) return x;
  return each<I>(
      [&](int i) { return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.v[i]), vdupq_n_s32(-N))); });
}
template <int N>
inline I shift_left(I x) {
  return each<I>([&](int i) { return vshlq_n_s32(x.v[i], N); });
}
// Of each byte of indices below 16 the byte of the table.
inline I look_up(const uint8_t* table, I index) {
  const uint8x16_t bytes = vld1q_u8(table);
  return each<I>([&](int i) { return vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_s32(index.v[i]))); });
}
inline int32_t sum(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[2]), vaddq_s32(x.v[1], x.v[3]))); }
inline int32_t largest(I x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[2]), vmaxq_s32(x.v[1], x.v[3]))); }
inline void store_i8(int8_t* p, I x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
