// Vectors for fit_lanes.h, included with it in each target region: SMOE_FIT_LANES floats, one sub-block to a lane, with
// the compiler's vector types.

constexpr uint32_t kLanes = SMOE_FIT_LANES;
typedef float V __attribute__((vector_size(4 * SMOE_FIT_LANES)));
typedef int32_t W __attribute__((vector_size(4 * SMOE_FIT_LANES)));
typedef int8_t B __attribute__((vector_size(SMOE_FIT_LANES)));

#if SMOE_FIT_LANES == 16
// rows[k], lane s: value k of row s of a matrix of sixteen rows that are `stride` apart.
inline void transpose16(const float* x, uint32_t stride, V* rows) {
  __m512 a[16], b[16];
  for (uint32_t s = 0; s < 16; ++s) a[s] = _mm512_loadu_ps(x + stride * s);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + c], 128-bit lane j: column 4j + c of rows i to i + 3
    for (int c = 0; c < 4; ++c) {
      const __m512d lower = _mm512_castps_pd(b[i + c / 2]), upper = _mm512_castps_pd(b[i + c / 2 + 2]);
      a[i + c] = _mm512_castpd_ps(c % 2 == 0 ? _mm512_unpacklo_pd(lower, upper) : _mm512_unpackhi_pd(lower, upper));
    }
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 even0 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), odd0 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    const __m512 even1 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    const __m512 odd1 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    rows[c] = (V)_mm512_shuffle_f32x4(even0, even1, 0x88);
    rows[c + 4] = (V)_mm512_shuffle_f32x4(odd0, odd1, 0x88);
    rows[c + 8] = (V)_mm512_shuffle_f32x4(even0, even1, 0xdd);
    rows[c + 12] = (V)_mm512_shuffle_f32x4(odd0, odd1, 0xdd);
  }
}

template <int N>
inline void transpose(const float* x, V (&rows)[N]) {
  for (int k = 0; k < N; k += 16) transpose16(x + k, N, rows + k);
}
#else
// rows[k] holds value k of each of the sub-blocks of n values.
template <int N>
inline void transpose(const float* x, V (&rows)[N]) {
  float lanes[N][kLanes];
  for (uint32_t s = 0; s < kLanes; ++s) {
    for (int k = 0; k < N; ++k) lanes[k][s] = x[static_cast<uint32_t>(N) * s + static_cast<uint32_t>(k)];
  }
  std::memcpy(rows, lanes, sizeof(lanes));
}
#endif

template <class T, int N>
inline void store_levels(const V (&level)[N], T* out) {
  float lanes[N][kLanes];
  std::memcpy(lanes, level, sizeof(lanes));
  for (uint32_t s = 0; s < kLanes; ++s) {
    for (int k = 0; k < N; ++k)
      out[static_cast<uint32_t>(N) * s + static_cast<uint32_t>(k)] = static_cast<T>(lanes[k][s]);
  }
}

constexpr float kShift = 12582912.0f;  // 1.5 * 2^23, see round_even in codec.h
constexpr float kReach = 4194304.0f;   // below this the shift rounds to nearest, halves to even

inline void round_level(const V& x, int32_t low, int32_t high, W* level) {  // round_even and a clamp, whatever x is
  const V shifted = x + kShift;
  W bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const W rounded = (bits & 0x7fffff) - 0x400000;
  const W raised = rounded < low ? W{} + low : rounded;
  *level = raised > high ? W{} + high : raised;
}

inline void to_float(const W& level, V* out) { *out = __builtin_convertvector(level, V); }
inline void magnitude(const V& x, V* out) {
  W bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits &= 0x7fffffff;
  std::memcpy(out, &bits, sizeof(bits));
}
inline void square_root(V* x) {
#if SMOE_FIT_LANES == 16
  *x = (V)_mm512_sqrt_ps((__m512)*x);
#elif defined(__AVX2__)
  *x = (V)_mm256_sqrt_ps((__m256)*x);
#else
  for (uint32_t lane = 0; lane < kLanes; ++lane) (*x)[lane] = std::sqrt((*x)[lane]);
#endif
}
inline bool any(const W& mask) {
#if SMOE_FIT_LANES == 16
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t lanes[kLanes], all = 0;
  std::memcpy(lanes, &mask, sizeof(lanes));
  for (const int32_t lane : lanes) all |= lane;
  return all != 0;
#endif
}
inline bool all(const W& mask) { return !any(~mask); }
inline bool all_within(const V& a, float low, const V& b, float high) {  // a from low on, b below high
#if SMOE_FIT_LANES == 16
  const __mmask16 from = _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(low), _CMP_GE_OQ);
  return _mm512_mask_cmp_ps_mask(from, (__m512)b, _mm512_set1_ps(high), _CMP_LT_OQ) == 0xffff;
#else
  return all((a >= low) & (b < high));
#endif
}
inline bool any_above(const V& a, float low) {
#if SMOE_FIT_LANES == 16
  return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(low), _CMP_GT_OQ) != 0;
#else
  return any(a > low);
#endif
}
inline bool within_reach(const V& a, const V& b) {
  return !any(~((a < kReach) & (a > -kReach) & (b < kReach) & (b > -kReach)));
}

// To the nearest, halves to even, where x is within reach; a zero may come out negative.
inline void round_here(const V& x, V* level) {
#if SMOE_FIT_LANES == 16
  *level = (V)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  *level = (x + kShift) - kShift;
#endif
}

// The same as round_level and to_float where x is within reach. Ends that nothing can pass need no Low or High.
template <bool Low, bool High>
inline void round_near(const V& x, float low, float high, V* level) {
  V place = x;
#if SMOE_FIT_LANES == 16
  if (Low) place = (V)_mm512_max_ps((__m512)place, _mm512_set1_ps(low));
  if (High) place = (V)_mm512_min_ps((__m512)place, _mm512_set1_ps(high));
#elif defined(__AVX2__)
  if (Low) place = (V)_mm256_max_ps((__m256)place, _mm256_set1_ps(low));
  if (High) place = (V)_mm256_min_ps((__m256)place, _mm256_set1_ps(high));
#else
  if (Low) place = place > low ? place : V{} + low;
  if (High) place = place < high ? place : V{} + high;
#endif
  round_here(place, level);
}
