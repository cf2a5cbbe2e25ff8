// AVX2 with FMA and F16C. Eight rows of a panel fill a register, so a panel is two halves.
//
// vpmaddubsw multiplies unsigned by signed bytes and adds pairs in int16 with saturation. Why nothing saturates,
// activations being within +-127:
//   Q4_0, Q4_K  q <= 15: a pair <= 2 * 15 * 127 = 3810; the eight of a 32-column block or sub-block <= 30480.
//   Q6_K        q <= 63: a pair <= 2 * 63 * 127 = 16002; two of them <= 32004.
//   Q8_0        |q| <= 128 with the sign moved to the activation: a pair <= 2 * 128 * 127 = 32512.
// int16 reaches 32767.
#if defined(__x86_64__)

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
#pragma GCC target("avx2,fma,f16c")

namespace smoe {
namespace {

#include "kernels/lanes_avx2.h"
#include "kernels/lanes_kernels.h"
#include "kernels/lanes_matmul.h"
#include "kernels/lanes_queries.h"

constexpr size_t kAhead = 4096;  // bytes that a decoding pass prefetches ahead of itself

inline __m256i weights(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i broadcast4(const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}
inline __m256i broadcast_pair(const int16_t* sums) {
  int32_t two;
  std::memcpy(&two, sums, 4);
  return _mm256_set1_epi32(two);
}
inline void prefetch(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + i), _MM_HINT_T0);
}

// One panel: [half][token].
template <int T>
using Ints = __m256i[2][T];
template <int T>
using Floats = F[T];

// acc[t] += dot * (d_w * d_a)
template <int T, class Act>
inline void scale_and_add(const Ints<T>& dot, F d, const Act* const* act, size_t b, Floats<T>& acc) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    acc[t] = fma(to_float(I{dot[0][t], dot[1][t]}), mul(d, set(act[t][b].d)), acc[t]);
  }
}

template <int T>
inline void clear(Ints<T>& x) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) x[0][t] = x[1][t] = _mm256_setzero_si256();
}

template <int T>
inline void put(const Floats<T>& acc, float* out) {
  for (int t = 0; t < T; ++t) store(out + static_cast<size_t>(t) * kLanes, acc[t]);
}

struct Q8_0 {
  static constexpr size_t kBlock = 544;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act32* act[T];
    act_pointers(job, act);
    Floats<T> acc;
    for (int t = 0; t < T; ++t) acc[t] = set(0.0f);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, kBlock);
      Ints<T> dot;
      clear<T>(dot);
#pragma GCC unroll 1  // see sum_nibbles
      for (size_t g = 0; g < 8; ++g) group<T>(w + 32 + 64 * g, act, b, 4 * g, dot);
      scale_and_add<T>(dot, scales_at(w), act, b, acc);
    }
    put<T>(acc, job.out);
  }

  template <int T>
  static inline void group(const uint8_t* w, const Act32* const* act, size_t b, size_t k, Ints<T>& dot) {
    const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i q = _mm256_xor_si256(weights(w + 32 * h), flip), magnitude = _mm256_abs_epi8(q);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i a = _mm256_sign_epi8(broadcast4(act[t][b].q + k), q);
        const __m256i products = _mm256_maddubs_epi16(magnitude, a);
        dot[h][t] = _mm256_add_epi32(dot[h][t], _mm256_madd_epi16(products, ones));
      }
    }
  }
};

// 32 columns of nibbles: sum[half][t] in int16, two to a row.
template <int T, class Act>
inline void sum_nibbles(const uint8_t* w, const Act* const* act, size_t b, size_t k, Ints<T>& sum) {
  const __m256i mask = _mm256_set1_epi8(15);
  clear<T>(sum);
  // Kept a loop: unrolled, GCC puts off the additions to the end and every product goes through the stack.
#pragma GCC unroll 1
  for (size_t g = 0; g < 4; ++g) {
    __m256i low[2], high[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i both = weights(w + 64 * g + 32 * static_cast<size_t>(h));
      low[h] = _mm256_and_si256(both, mask);
      high[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256i a = broadcast4(act[t][b].q + k + 4 * g), c = broadcast4(act[t][b].q + k + 16 + 4 * g);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i pair = _mm256_add_epi16(_mm256_maddubs_epi16(low[h], a), _mm256_maddubs_epi16(high[h], c));
        sum[h][t] = _mm256_add_epi16(sum[h][t], pair);
      }
    }
  }
}

// total[half][t] += pairs of 16-bit sums times 16-bit factors
template <int T>
inline void add_scaled(const Ints<T>& sum, const __m256i (&factor)[2], Ints<T>& total) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      total[h][t] = _mm256_add_epi32(total[h][t], _mm256_madd_epi16(sum[h][t], factor[h]));
    }
  }
}

struct Q4_0 {
  static constexpr size_t kBlock = 288;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act32* act[T];
    act_pointers(job, act);
    Floats<T> acc;
    for (int t = 0; t < T; ++t) acc[t] = set(0.0f);
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, kBlock);
      Ints<T> dot;
      sum_nibbles<T>(w + 32, act, b, 0, dot);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i start = _mm256_set1_epi32(act[t][b].start8);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) dot[h][t] = _mm256_add_epi32(start, _mm256_madd_epi16(dot[h][t], ones));
      }
      scale_and_add<T>(dot, scales_at(w), act, b, acc);
    }
    put<T>(acc, job.out);
  }
};

struct Q4_K {
  static constexpr size_t kBlock = 2304;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act256* act[T];
    act_pointers(job, act);
    Floats<T> acc;
    for (int t = 0; t < T; ++t) acc[t] = set(0.0f);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      const PanelScales scales = scales_q4_k(w);
      Ints<T> total;
      clear<T>(total);
      for (size_t s = 0; s < 8; ++s) {
        if (job.ahead) prefetch(w + 256 * s, s == 7 ? 512 : 256);
        Ints<T> sum;
        sum_nibbles<T>(w + 256 * (s + 1), act, b, 32 * s, sum);
        const I twice = bit_or(scales.scale[s], shift_left<16>(scales.scale[s]));
        const __m256i factor[2] = {twice.a, twice.b};
        add_scaled<T>(sum, factor, total);
      }
      scale_and_add<T>(total, scales_at(w), act, b, acc);
      take_minimums<T>(w, scales, act, b, acc);
    }
    put<T>(acc, job.out);
  }

  // acc -= dmin d_a (minimums . sums)
  template <int T>
  static inline void take_minimums(const uint8_t* w, const PanelScales& scales, const Act256* const* act, size_t b,
                                   Floats<T>& acc) {
    Ints<T> mins;
    clear<T>(mins);
    for (size_t s = 0; s < 8; s += 2) {
      const I pair = bit_or(scales.min[s], shift_left<16>(scales.min[s + 1]));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i sums = broadcast_pair(act[t][b].sum32 + s);
        mins[0][t] = _mm256_add_epi32(mins[0][t], _mm256_madd_epi16(pair.a, sums));
        mins[1][t] = _mm256_add_epi32(mins[1][t], _mm256_madd_epi16(pair.b, sums));
      }
    }
    const F dmin = scales_at(w + 32);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      acc[t] = fnma(to_float(I{mins[0][t], mins[1][t]}), mul(dmin, set(act[t][b].d)), acc[t]);
    }
  }
};

struct Q6_K {
  static constexpr size_t kBlock = 3360;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act256* act[T];
    act_pointers(job, act);
    Floats<T> acc;
    for (int t = 0; t < T; ++t) acc[t] = set(0.0f);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, 288);
      Ints<T> total,
          offset;  // of q in 0..63, and the sum of scale times activations that stands 32 times too much in it
      clear<T>(total);
      clear<T>(offset);
      for (size_t s = 0; s < 16; ++s) {
        if (job.ahead) prefetch(w + 288 + 192 * s, 192);
        sub_block<T>(w, act, b, s, total);
        if (s % 2 == 1) add_offsets<T>(w, act, b, s - 1, offset);
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        for (int h = 0; h < 2; ++h) total[h][t] = _mm256_sub_epi32(total[h][t], _mm256_slli_epi32(offset[h][t], 5));
      }
      scale_and_add<T>(total, scales_at(w), act, b, acc);
    }
    put<T>(acc, job.out);
  }

  template <int T>
  static inline void sub_block(const uint8_t* w, const Act256* const* act, size_t b, size_t s, Ints<T>& total) {
    const __m256i low = _mm256_set1_epi8(15), high = _mm256_set1_epi8(48);
    const auto merge = [&](__m256i nibble, __m256i bits) {
      return _mm256_or_si256(_mm256_and_si256(nibble, low), _mm256_and_si256(bits, high));
    };
    const I scale = widen_i8(w + 32 + 16 * s);
    const I twice = bit_or(bit_and(scale, set(0xffff)), shift_left<16>(scale));
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const uint8_t* p = w + 288 + 192 * s + 32 * half;
      const __m256i a = weights(p), c = weights(p + 64), h = weights(p + 128);
      const __m256i q0 = merge(a, _mm256_slli_epi16(h, 4)), q1 = merge(c, _mm256_slli_epi16(h, 2));
      const __m256i q2 = merge(_mm256_srli_epi16(a, 4), h);
      const __m256i q3 = merge(_mm256_srli_epi16(c, 4), _mm256_srli_epi16(h, 2));
      const __m256i factor = half == 0 ? twice.a : twice.b;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const int8_t* x = act[t][b].q + 16 * s;
        const __m256i first =
            _mm256_add_epi16(_mm256_maddubs_epi16(q0, broadcast4(x)), _mm256_maddubs_epi16(q1, broadcast4(x + 4)));
        const __m256i second =
            _mm256_add_epi16(_mm256_maddubs_epi16(q2, broadcast4(x + 8)), _mm256_maddubs_epi16(q3, broadcast4(x + 12)));
        const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(first, factor), _mm256_madd_epi16(second, factor));
        total[half][t] = _mm256_add_epi32(total[half][t], both);
      }
    }
  }

  // offset += scale[s] sum16[s] + scale[s + 1] sum16[s + 1]
  template <int T>
  static inline void add_offsets(const uint8_t* w, const Act256* const* act, size_t b, size_t s, Ints<T>& offset) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 32 + 16 * s));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 48 + 16 * s));
    const __m256i upper = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
    const __m256i lower = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256i sums = broadcast_pair(act[t][b].sum16 + s);
      offset[0][t] = _mm256_add_epi32(offset[0][t], _mm256_madd_epi16(upper, sums));
      offset[1][t] = _mm256_add_epi32(offset[1][t], _mm256_madd_epi16(lower, sums));
    }
  }
};

// ---- the words of strip_tiles.h: a part is 16-bit sums of pairs ----

constexpr int level_bias(int most) { return most > 63 ? 128 : 0; }
constexpr int room(int most) { return most > 63 ? 1 : 32767 / (2 * most * 127) >= 8 ? 8 : most > 31 ? 2 : 4; }
constexpr bool kPartsAreWhole = false;

inline __m256i products(__m256i level, __m256i x, bool wide) {
  if (!wide) return _mm256_maddubs_epi16(level, x);
  const __m256i q = _mm256_xor_si256(level, _mm256_set1_epi8(static_cast<char>(0x80)));
  return _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q));
}

template <int Most, int P, int T>
inline void add_group(const I (&level)[P], const int8_t* const (&x)[T], I (&part)[P][T]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const __m256i a = broadcast4(x[t]);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      I& sum = part[p][t];
      sum.a = _mm256_add_epi16(sum.a, products(level[p].a, a, level_bias(Most) != 0));
      sum.b = _mm256_add_epi16(sum.b, products(level[p].b, a, level_bias(Most) != 0));
      // Made here and now: left to itself, GCC puts off the additions and every product goes through the stack.
      asm("" : "+x"(sum.a), "+x"(sum.b));
    }
  }
}

template <int P, int T>
inline void fold_by(const I (&factor)[P], I (&part)[P][T], I (&total)[P][T]) {
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const I sums = {_mm256_madd_epi16(part[p][t].a, factor[p].a), _mm256_madd_epi16(part[p][t].b, factor[p].b)};
      total[p][t] = add(total[p][t], sums);
      part[p][t] = set(int32_t{0});
    }
  }
}

template <int P, int T>
inline void fold(I (&part)[P][T], const I (&scale)[P], I (&total)[P][T]) {
  I twice[P];
  for (int p = 0; p < P; ++p) twice[p] = bit_or(bit_and(scale[p], set(0xffff)), shift_left<16>(scale[p]));
  fold_by(twice, part, total);
}

template <int P, int T>
inline void fold(I (&part)[P][T], I (&total)[P][T]) {
  I ones[P];
  for (int p = 0; p < P; ++p) ones[p] = set(0x00010001);
  fold_by(ones, part, total);
}

inline I add_products(I acc, I pairs, const int16_t* two) {
  const __m256i both = broadcast_pair(two);
  return add(acc, I{_mm256_madd_epi16(pairs.a, both), _mm256_madd_epi16(pairs.b, both)});
}
inline I subtract(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }

constexpr int kTilePanels = 1, kTileTokens = 4, kStreamTokens = 4;

#include "kernels/panel_tiles.h"

}  // namespace
}  // namespace smoe

#pragma GCC pop_options

namespace smoe {
namespace {

bool supported() { return cpu_features().avx2; }

constexpr Kernels kAvx2 = {
    "avx2",         10,       supported,  quantize_act,  matmul_q8, matmul_f32,     attn_scores,    attn_values,
    attn_fold,      rms_norm, silu_mul,   exp_sum,       max_value, f32_to_f16_row, f16_to_f32_row, f32_to_kv8_row,
    kv8_to_f32_row, conv_row, state_step, selective_step};
const RegisterKernels registration(&kAvx2);

}  // namespace
}  // namespace smoe

#endif  // __x86_64__
