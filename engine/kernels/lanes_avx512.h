// Sixteen lanes of float32 or int32 in one 512-bit register. The vocabulary of lanes_kernels.h. Included inside the
// target region and the unnamed namespace of isa_avx512.cpp.

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};

// Accumulators that fit the registers: rows times vectors of a tile, and rows (or keys) times one vector.
constexpr int kDotRows = 4, kDotVectors = 4, kDotStreams = 8;
constexpr int kAttnSums = 16;  // keys (or registers of values) times queries of lanes_queries.h

inline __mmask16 first(size_t n) { return static_cast<__mmask16>((1u << n) - 1); }

inline F set(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F load(const float* p, size_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, F a, size_t n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline __m256i load_16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i load_16(const uint16_t* p, size_t n) { return _mm256_maskz_loadu_epi16(first(n), p); }
inline F widen_f16(__m256i h) { return {_mm512_cvtph_ps(h)}; }
inline F set_f16(uint16_t h) { return {_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(h)))}; }
inline F widen_bf16(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
inline void store_f16(uint16_t* p, F a, size_t n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a * b + c
inline F fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }                // b where either is NaN
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
// a where not (x < limit), else 0.
inline F zero_where_below(F x, float limit, F a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}

// Fixed order: halves added to halves, down to one.
inline float sum(F a) {
  const __m256 h8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}
// out[i] = sum(a[i]), in the same order: sixteen are added up side by side.
template <int N>
inline void store_sums(const F (&a)[N], float* out) {
  if constexpr (N != 16) {
    for (int i = 0; i < N; ++i) out[i] = sum(a[i]);
  } else {
    __m512 quarter[4], half[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // fours of sums 4 j + i, j ascending over the quarters of the register
      const __m512 x = a[i].v, y = a[4 + i].v, z = a[8 + i].v, w = a[12 + i].v;
      const __m512 xy = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
      const __m512 zw = _mm512_add_ps(_mm512_shuffle_f32x4(z, w, 0x44), _mm512_shuffle_f32x4(z, w, 0xee));
      quarter[i] = _mm512_add_ps(_mm512_shuffle_f32x4(xy, zw, 0x88), _mm512_shuffle_f32x4(xy, zw, 0xdd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)  // pairs of sums 4 j + 2 i and 4 j + 2 i + 1, even lanes and odd
      half[i] = _mm512_add_ps(_mm512_unpacklo_ps(quarter[2 * i], quarter[2 * i + 1]),
                              _mm512_unpackhi_ps(quarter[2 * i], quarter[2 * i + 1]));
    const __m512d x = _mm512_castps_pd(half[0]), y = _mm512_castps_pd(half[1]);
    _mm512_storeu_ps(
        out, _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y))));
  }
}
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }

inline I load_int(const void* p) { return {_mm512_loadu_si512(p)}; }
inline I widen_i8(const void* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))}; }
inline I set(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I bits(F a) { return {_mm512_castps_si512(a.v)}; }
inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I round_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I min(I a, I b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I bit_and(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I bit_or(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
inline I shift_right(I a) {
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
inline I shift_left(I a) {
  return {_mm512_slli_epi32(a.v, N)};
}
// Of each byte of indices below 16 the byte of the table.
inline I look_up(const uint8_t* table, I index) {
  const __m512i four = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(four, index.v)};
}
inline int32_t sum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t largest(I a) { return _mm512_reduce_max_epi32(a.v); }
inline void store_i8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
