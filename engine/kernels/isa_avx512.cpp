// AVX-512 with VNNI. A panel's sixteen rows are the sixteen 32-bit lanes of a register: one vpdpbusd multiplies four
// columns of every row by four activations and adds them up, so that no sum ever crosses lanes.
//
// Tiles: P panels times T tokens, an integer accumulator for each pair, so that a weight register serves T products and
// an activation broadcast P. Which tile a token or a row falls into does not change its bits: the integer part is exact
// and the float part is one fused multiply-add per block in block order (two with minimums), as in scalar.
#if defined(__x86_64__)

// GCC 12's own AVX-512 intrinsics start from registers declared as `x = x` and set off these two warnings (GCC bug
// 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/act.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "quant/codec.h"
#include "util/cpu_features.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

namespace smoe {
namespace {

#include "kernels/lanes_avx512.h"
#include "kernels/lanes_kernels.h"
#include "kernels/lanes_matmul.h"
#include "kernels/lanes_queries.h"

constexpr size_t kAhead = 8192;  // bytes that a decoding pass prefetches ahead of itself

inline __m512i weights(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m512 halves(const uint8_t* p) { return scales_at(p).v; }
inline __m512i broadcast4(const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm512_set1_epi32(four);
}

inline void prefetch(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + i), _MM_HINT_T0);
}

// acc[p][t] += dot * (d_w * d_a)
template <int P, int T>
inline void scale_and_add(const __m512i (&dot)[P][T], const __m512 (&d)[P], const float (&d_act)[T],
                          __m512 (&acc)[P][T]) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const __m512 da = _mm512_set1_ps(d_act[t]);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      acc[p][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[p][t]), _mm512_mul_ps(d[p], da), acc[p][t]);
    }
  }
}

// dot[p][t] += q[p] . four activations of each token from column k
template <int P, int T, class Act>
inline void dot4(const __m512i (&q)[P], const Act* const* act, size_t b, size_t k, __m512i (&dot)[P][T]) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const __m512i a = broadcast4(act[t][b].q + k);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) dot[p][t] = _mm512_dpbusd_epi32(dot[p][t], q[p], a);
  }
}

// 32 columns in four groups of nibbles, see quant/q4_0.cpp
template <int P, int T, class Act>
inline void dot_nibbles(const uint8_t* w, size_t panel, const Act* const* act, size_t b, size_t k,
                        __m512i (&dot)[P][T]) {
  const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (size_t g = 0; g < 4; ++g) {
    __m512i low[P], high[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const __m512i both = weights(w + static_cast<size_t>(p) * panel + 64 * g);
      low[p] = _mm512_and_si512(both, mask);
      high[p] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
    dot4<P, T>(low, act, b, k + 4 * g, dot);
    dot4<P, T>(high, act, b, k + 16 + 4 * g, dot);
  }
}

template <int P, int T>
inline void clear(__m512 (&acc)[P][T]) {
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[p][t] = _mm512_setzero_ps();
  }
}

template <int P, int T>
inline void clear(__m512i (&x)[P][T]) {
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) x[p][t] = _mm512_setzero_si512();
  }
}

template <int P, int T>
inline void put(const __m512 (&acc)[P][T], float* out) {
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) _mm512_storeu_ps(out + (p * T + t) * 16, acc[p][t]);
  }
}

struct Q8_0 {
  static constexpr size_t kBlock = 544;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act32* act[T];
    act_pointers(job, act);
    __m512 acc[P][T];
    clear(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, kBlock);
      __m512i dot[P][T];
      float d_act[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        d_act[t] = act[t][b].d;
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) dot[p][t] = _mm512_set1_epi32(act[t][b].start128);
      }
#pragma GCC unroll 8
      for (size_t g = 0; g < 8; ++g) {
        __m512i q[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) q[p] = weights(w + static_cast<size_t>(p) * job.panel + 32 + 64 * g);
        dot4<P, T>(q, act, b, 4 * g, dot);
      }
      __m512 d[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) d[p] = halves(w + static_cast<size_t>(p) * job.panel);
      scale_and_add(dot, d, d_act, acc);
    }
    put(acc, job.out);
  }
};

struct Q4_0 {
  static constexpr size_t kBlock = 288;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act32* act[T];
    act_pointers(job, act);
    __m512 acc[P][T];
    clear(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, kBlock);
      __m512i dot[P][T];
      float d_act[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        d_act[t] = act[t][b].d;
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) dot[p][t] = _mm512_set1_epi32(act[t][b].start8);
      }
      dot_nibbles<P, T>(w + 32, job.panel, act, b, 0, dot);
      __m512 d[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) d[p] = halves(w + static_cast<size_t>(p) * job.panel);
      scale_and_add(dot, d, d_act, acc);
    }
    put(acc, job.out);
  }
};

// Bytes 0 2 1 3 of a word are four neighbours: each pair as two 16-bit integers.
inline void pairs(__m512i bytes, __m512i* first_two, __m512i* last_two) {
  const __m512i even = _mm512_set1_epi32(0x00ff00ff);
  *first_two = _mm512_and_si512(bytes, even);
  *last_two = _mm512_and_si512(_mm512_srli_epi32(bytes, 8), even);
}

// The scales and minimums of a Q4_K panel block as pairs (2i, 2i + 1).
inline void pairs_q4_k(const uint8_t* w, __m512i* scale, __m512i* min) {
  const __m512i s0 = weights(w + 64), s1 = weights(w + 128), s2 = weights(w + 192);
  const __m512i six = _mm512_set1_epi8(63), two = _mm512_set1_epi8(3);
  const __m512i h0 = _mm512_and_si512(_mm512_srli_epi32(s0, 6), two);
  const __m512i h1 = _mm512_and_si512(_mm512_srli_epi32(s1, 4), _mm512_slli_epi32(two, 2));
  const __m512i h2 = _mm512_and_si512(_mm512_srli_epi32(s2, 2), _mm512_slli_epi32(two, 4));
  pairs(_mm512_and_si512(s0, six), scale, scale + 1);
  pairs(_mm512_and_si512(s1, six), scale + 2, scale + 3);
  pairs(_mm512_and_si512(s2, six), min, min + 1);
  pairs(_mm512_or_si512(h0, _mm512_or_si512(h1, h2)), min + 2, min + 3);
}

inline __m512i broadcast_pair(const int16_t* sums) {
  int32_t two;
  std::memcpy(&two, sums, 4);
  return _mm512_set1_epi32(two);
}

// total[p][t] += scale[p] * part[p][t], in int32
template <int P, int T>
inline void add_scaled(const __m512i (&part)[P][T], const __m512i (&scale)[P], __m512i (&total)[P][T]) {
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) total[p][t] = _mm512_add_epi32(total[p][t], _mm512_mullo_epi32(part[p][t], scale[p]));
  }
}

struct Q4_K {
  static constexpr size_t kBlock = 2304;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act256* act[T];
    act_pointers(job, act);
    __m512 acc[P][T];
    clear(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      __m512i scale[P][4], min[P][4], total[P][T];
      for (int p = 0; p < P; ++p) pairs_q4_k(w + static_cast<size_t>(p) * job.panel, scale[p], min[p]);
      clear(total);
#pragma GCC unroll 1  // unrolled, GCC puts off the additions to `total` and spills what they wait for
      for (size_t i = 0; i < 4; ++i) {
        if (job.ahead) prefetch(w + 512 * i, i == 3 ? 768 : 512);
        __m512i even[P], odd[P], part[P][T];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
          even[p] = _mm512_and_si512(scale[p][i], _mm512_set1_epi32(63));
          odd[p] = _mm512_srli_epi32(scale[p][i], 16);
        }
        clear(part);
        dot_nibbles<P, T>(w + 256 * (2 * i + 1), job.panel, act, b, 64 * i, part);
        add_scaled(part, even, total);
        clear(part);
        dot_nibbles<P, T>(w + 256 * (2 * i + 2), job.panel, act, b, 64 * i + 32, part);
        add_scaled(part, odd, total);
      }
      fold(w, job.panel, act, b, total, min, acc);
    }
    put(acc, job.out);
  }

  // acc += d d_a total - dmin d_a (minimums . sums)
  template <int P, int T>
  static inline void fold(const uint8_t* w, size_t panel, const Act256* const* act, size_t b,
                          const __m512i (&total)[P][T], const __m512i (&min)[P][4], __m512 (&acc)[P][T]) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const __m512 d = halves(w + static_cast<size_t>(p) * panel),
                   dmin = halves(w + static_cast<size_t>(p) * panel + 32);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        __m512i mins = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          mins = _mm512_dpwssd_epi32(mins, min[p][i], broadcast_pair(act[t][b].sum32 + 2 * i));
        const __m512 da = _mm512_set1_ps(act[t][b].d);
        acc[p][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[p][t]), _mm512_mul_ps(d, da), acc[p][t]);
        acc[p][t] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins), _mm512_mul_ps(dmin, da), acc[p][t]);
      }
    }
  }
};

struct Q6_K {
  static constexpr size_t kBlock = 3360;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act256* act[T];
    act_pointers(job, act);
    __m512 acc[P][T];
    clear(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      __m512i total[P][T];
      clear(total);
      if (job.ahead) prefetch(w, 288);
      for (size_t s = 0; s < 16; ++s) {
        if (job.ahead) prefetch(w + 288 + 192 * s, 192);
        sub_block<P, T>(w, job.panel, act, b, s, total);
      }
      __m512 d[P];
      float d_act[T];
      for (int p = 0; p < P; ++p) d[p] = halves(w + static_cast<size_t>(p) * job.panel);
      for (int t = 0; t < T; ++t) d_act[t] = act[t][b].d;
      scale_and_add(total, d, d_act, acc);
    }
    put(acc, job.out);
  }

  template <int P, int T>
  static inline void sub_block(const uint8_t* w, size_t panel, const Act256* const* act, size_t b, size_t s,
                               __m512i (&total)[P][T]) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(48);
    __m512i q0[P], q1[P], q2[P], q3[P], scale[P], part[P][T];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const uint8_t* base = w + static_cast<size_t>(p) * panel;
      const __m512i a = weights(base + 288 + 192 * s), c = weights(base + 352 + 192 * s),
                    h = weights(base + 416 + 192 * s);
      // low nibble where the mask is set, else the two upper bits shifted into place
      const auto merge = [&](__m512i nibble, __m512i bits) {
        return _mm512_or_si512(_mm512_and_si512(nibble, low), _mm512_and_si512(bits, high));
      };
      q0[p] = merge(a, _mm512_slli_epi16(h, 4));
      q1[p] = merge(c, _mm512_slli_epi16(h, 2));
      q2[p] = merge(_mm512_srli_epi16(a, 4), h);
      q3[p] = merge(_mm512_srli_epi16(c, 4), _mm512_srli_epi16(h, 2));
      scale[p] = widen_i8(base + 32 + 16 * s).v;
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) part[p][t] = _mm512_set1_epi32(act[t][b].start32[s]);
    }
    dot4<P, T>(q0, act, b, 16 * s, part);
    dot4<P, T>(q1, act, b, 16 * s + 4, part);
    dot4<P, T>(q2, act, b, 16 * s + 8, part);
    dot4<P, T>(q3, act, b, 16 * s + 12, part);
    add_scaled(part, scale, total);
  }
};

// ---- the words of strip_tiles.h ----

constexpr int level_bias(int) { return 0; }
constexpr int room(int) { return 8; }
constexpr bool kPartsAreWhole = true;

template <int Most, int P, int T>
inline void add_group(const I (&level)[P], const int8_t* const (&x)[T], I (&part)[P][T]) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const __m512i a = broadcast4(x[t]);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) part[p][t].v = _mm512_dpbusd_epi32(part[p][t].v, level[p].v, a);
  }
}

template <int P, int T>
inline void fold(I (&part)[P][T], const I (&scale)[P], I (&total)[P][T]) {
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      total[p][t].v = _mm512_add_epi32(total[p][t].v, _mm512_mullo_epi32(part[p][t].v, scale[p].v));
      part[p][t].v = _mm512_setzero_si512();
    }
  }
}

inline I add_products(I acc, I pairs, const int16_t* two) {
  return {_mm512_dpwssd_epi32(acc.v, pairs.v, broadcast_pair(two))};
}
inline I subtract(I x, I y) { return {_mm512_sub_epi32(x.v, y.v)}; }

constexpr int kTilePanels = 2, kTileTokens = 4, kStreamTokens = 8;

#include "kernels/panel_tiles.h"

}  // namespace
}  // namespace smoe

#pragma GCC pop_options

namespace smoe {
namespace {

bool supported() { return cpu_features().avx512; }

constexpr Kernels kAvx512 = {
    "avx512",       20,       supported,  quantize_act,  matmul_q8, matmul_f32,     attn_scores,    attn_values,
    attn_fold,      rms_norm, silu_mul,   exp_sum,       max_value, f32_to_f16_row, f16_to_f32_row, f32_to_kv8_row,
    kv8_to_f32_row, conv_row, state_step, selective_step};
const RegisterKernels registration(&kAvx512);

}  // namespace
}  // namespace smoe

#endif  // __x86_64__
