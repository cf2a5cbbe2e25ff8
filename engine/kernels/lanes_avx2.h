// Sixteen lanes of float32 or int32 in two 256-bit registers. The vocabulary of lanes_kernels.h. Included inside the
// target region and the unnamed namespace of isa_avx2.cpp.

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

// Rows times vectors of a tile, more than the registers hold: it is the reads of the vectors that cost (measured: 2 x 2
// without a spill is a third slower). And rows (or keys) times one vector.
constexpr int kDotRows = 4, kDotVectors = 4, kDotStreams = 4;
constexpr int kAttnSums = 4;  // keys (or registers of values) times queries of lanes_queries.h

// All ones in the first n of eight 32-bit lanes; n may be negative or above 8.
inline __m256i first8(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load(const float* p, size_t n) {
  const int count = static_cast<int>(n);
  return {_mm256_maskload_ps(p, first8(count)), _mm256_maskload_ps(p + 8, first8(count - 8))};
}
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store(float* p, F x, size_t n) {
  const int count = static_cast<int>(n);
  _mm256_maskstore_ps(p, first8(count), x.a);
  _mm256_maskstore_ps(p + 8, first8(count - 8), x.b);
}
inline __m256i load_16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i load_16(const uint16_t* p, size_t n) {
  uint16_t whole[16] = {};
  std::memcpy(whole, p, n * sizeof(uint16_t));
  return load_16(whole);
}
inline F widen_f16(__m256i h) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
inline __m256 widen_bf16_8(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline F set_f16(uint16_t h) {
  const __m256 x = _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(h)));
  return {x, x};
}
inline F widen_bf16(__m256i h) {
  return {widen_bf16_8(_mm256_castsi256_si128(h)), widen_bf16_8(_mm256_extracti128_si256(h, 1))};
}
inline void store_f16(uint16_t* p, F x, size_t n) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  uint16_t whole[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(whole), _mm256_cvtps_ph(x.a, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(whole + 8), _mm256_cvtps_ph(x.b, kNearest));
  std::memcpy(p, whole, n * sizeof(uint16_t));
}

inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }  // x * y + z
inline F fnma(F x, F y, F z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}  // z - x * y
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }  // y where either is NaN
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
// y where not (x < limit), else 0.
inline F zero_where_below(F x, float limit, F y) {
  const __m256 edge = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, edge, _CMP_NLT_UQ), y.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, edge, _CMP_NLT_UQ), y.b)};
}

// Fixed order: halves added to halves, down to one.
inline float sum(F x) {
  const __m256 h8 = _mm256_add_ps(x.a, x.b);
  const __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}
inline __m128 onto_four(F x) {
  const __m256 h8 = _mm256_add_ps(x.a, x.b);
  return _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
}
// out[i] = sum(a[i]), in the same order: four are added up side by side.
template <int N>
inline void store_sums(const F (&a)[N], float* out) {
  if constexpr (N != 4) {
    for (int i = 0; i < N; ++i) out[i] = sum(a[i]);
  } else {
    const __m128 x = onto_four(a[0]), y = onto_four(a[1]), z = onto_four(a[2]), w = onto_four(a[3]);
    const __m128 xy = _mm_add_ps(_mm_unpacklo_ps(x, y), _mm_unpackhi_ps(x, y));
    const __m128 zw = _mm_add_ps(_mm_unpacklo_ps(z, w), _mm_unpackhi_ps(z, w));
    _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(xy, zw), _mm_movehl_ps(zw, xy)));
  }
}
inline float largest(F x) {
  const __m256 h8 = _mm256_max_ps(x.a, x.b);
  const __m128 h4 = _mm_max_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
  const __m128 h2 = _mm_max_ps(h4, _mm_movehl_ps(h4, h4));
  return _mm_cvtss_f32(_mm_max_ss(h2, _mm_movehdup_ps(h2)));
}

inline I load_int(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline I widen_i8(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
inline I set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I round_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }  // to nearest, ties to even
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I min(I x, I y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
inline I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I bit_and(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I bit_or(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int N>
inline I shift_right(I x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
inline I shift_left(I x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
// Of each byte of indices below 16 the byte of the table.
inline I look_up(const uint8_t* table, I index) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(both, index.a), _mm256_shuffle_epi8(both, index.b)};
}
inline int32_t sum(I x) {
  const __m256i h8 = _mm256_add_epi32(x.a, x.b);
  const __m128i h4 = _mm_add_epi32(_mm256_castsi256_si128(h8), _mm256_extracti128_si256(h8, 1));
  const __m128i h2 = _mm_add_epi32(h4, _mm_shuffle_epi32(h4, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(h2, _mm_shuffle_epi32(h2, 0xb1)));
}
inline int32_t largest(I x) {
  const __m256i h8 = _mm256_max_epi32(x.a, x.b);
  const __m128i h4 = _mm_max_epi32(_mm256_castsi256_si128(h8), _mm256_extracti128_si256(h8, 1));
  const __m128i h2 = _mm_max_epi32(h4, _mm_shuffle_epi32(h4, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(h2, _mm_shuffle_epi32(h2, 0xb1)));
}
inline void store_i8(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m256i bytes = _mm256_packs_epi16(words, words);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p + 8), _mm256_extracti128_si256(bytes, 1));
}
