// Tiles of quantised panels on Arm. A register holds four rows times four columns, so a panel is four registers.
// Included inside the unnamed namespace of isa_neon.cpp and isa_neon_dot.cpp, which have defined
//   int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t x)  acc[r] += the four products of row r

constexpr size_t kAhead = 2048;  // bytes that a decoding pass prefetches ahead of itself

inline int8x16_t signed_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
inline int8x16_t broadcast4(const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
inline void prefetch(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + kAhead + i);
}

// acc[t] += dot[t] * (d_w * d_a)
template <int T, class Act>
inline void scale_and_add(const I (&dot)[T], F d, const Act* const* act, size_t b, F (&acc)[T]) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) acc[t] = fma(to_float(dot[t]), mul(d, set(act[t][b].d)), acc[t]);
}

template <int T>
inline void clear(F (&acc)[T]) {
  for (int t = 0; t < T; ++t) acc[t] = set(0.0f);
}

template <int T>
inline void put(const F (&acc)[T], float* out) {
  for (int t = 0; t < T; ++t) store(out + static_cast<size_t>(t) * kLanes, acc[t]);
}

struct Q8_0 {
  static constexpr size_t kBlock = 544;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act32* act[T];
    act_pointers(job, act);
    F acc[T];
    clear(acc);
    const uint8x16_t flip = vdupq_n_u8(0x80);  // stored with 128 added
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, kBlock);
      I dot[T];
      for (int t = 0; t < T; ++t) dot[t] = set(int32_t{0});
      for (size_t g = 0; g < 8; ++g) {
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
          const int8x16_t rows = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 32 + 64 * g + 16 * q), flip));
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) dot[t].v[q] = dot4(dot[t].v[q], rows, broadcast4(act[t][b].q + 4 * g));
        }
      }
      scale_and_add(dot, scales_at(w), act, b, acc);
    }
    put(acc, job.out);
  }
};

// 32 columns of nibbles, 0 to 15: dot[t] += them times the activations from column k on.
template <int T, class Act>
inline void add_nibbles(const uint8_t* w, const Act* const* act, size_t b, size_t k, I (&dot)[T]) {
  const uint8x16_t mask = vdupq_n_u8(15);
  for (size_t g = 0; g < 4; ++g) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const uint8x16_t both = vld1q_u8(w + 64 * g + 16 * q);
      const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(both, mask)), high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const int8_t* x = act[t][b].q + k + 4 * g;
        dot[t].v[q] = dot4(dot4(dot[t].v[q], low, broadcast4(x)), high, broadcast4(x + 16));
      }
    }
  }
}

struct Q4_0 {
  static constexpr size_t kBlock = 288;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act32* act[T];
    act_pointers(job, act);
    F acc[T];
    clear(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, kBlock);
      I dot[T];
      for (int t = 0; t < T; ++t) dot[t] = set(act[t][b].start8);
      add_nibbles(w + 32, act, b, 0, dot);
      scale_and_add(dot, scales_at(w), act, b, acc);
    }
    put(acc, job.out);
  }
};

struct Q4_K {
  static constexpr size_t kBlock = 2304;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act256* act[T];
    act_pointers(job, act);
    F acc[T];
    clear(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      const PanelScales scales = scales_q4_k(w);
      const F d = scales_at(w), dmin = scales_at(w + 32);
      I total[T], mins[T];
      for (int t = 0; t < T; ++t) total[t] = mins[t] = set(int32_t{0});
      for (size_t s = 0; s < 8; ++s) {
        if (job.ahead) prefetch(w + 256 * s, 256);
        I dot[T];
        for (int t = 0; t < T; ++t) dot[t] = set(int32_t{0});
        add_nibbles(w + 256 * (s + 1), act, b, 32 * s, dot);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          total[t] = mul_add(dot[t], scales.scale[s], total[t]);
          mins[t] = mul_add(scales.min[s], set(int32_t{act[t][b].sum32[s]}), mins[t]);
        }
      }
      scale_and_add(total, d, act, b, acc);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[t] = fnma(to_float(mins[t]), mul(dmin, set(act[t][b].d)), acc[t]);
    }
    put(acc, job.out);
  }
};

struct Q6_K {
  static constexpr size_t kBlock = 3360;
  template <int P, int T>
  static void tile(const Tile& job) {
    const Act256* act[T];
    act_pointers(job, act);
    F acc[T];
    clear(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, 288);
      I total[T];
      for (int t = 0; t < T; ++t) total[t] = set(int32_t{0});
      for (size_t s = 0; s < 16; ++s) {
        if (job.ahead) prefetch(w + 288 + 192 * s, 192);
        I dot[T];
        for (int t = 0; t < T; ++t) dot[t] = set(act[t][b].start32[s]);  // stored with 32 added
        sub_block(w + 288 + 192 * s, act, b, 16 * s, dot);
        const I scale = widen_i8(w + 32 + 16 * s);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) total[t] = mul_add(dot[t], scale, total[t]);
      }
      scale_and_add(total, scales_at(w), act, b, acc);
    }
    put(acc, job.out);
  }

  // 16 columns from column k on.
  template <int T>
  static inline void sub_block(const uint8_t* p, const Act256* const* act, size_t b, size_t k, I (&dot)[T]) {
    const uint8x16_t low = vdupq_n_u8(15), high = vdupq_n_u8(48);
    const auto merge = [&](uint8x16_t nibble, uint8x16_t bits) {
      return vreinterpretq_s8_u8(vorrq_u8(vandq_u8(nibble, low), vandq_u8(bits, high)));
    };
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const uint8x16_t a = vld1q_u8(p + 16 * q), c = vld1q_u8(p + 64 + 16 * q), h = vld1q_u8(p + 128 + 16 * q);
      const int8x16_t part[4] = {merge(a, vshlq_n_u8(h, 4)), merge(c, vshlq_n_u8(h, 2)), merge(vshrq_n_u8(a, 4), h),
                                 merge(vshrq_n_u8(c, 4), vshrq_n_u8(h, 2))};
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          dot[t].v[q] = dot4(dot[t].v[q], part[i], broadcast4(act[t][b].q + k + 4 * i));
        }
      }
    }
  }
};

// ---- the words of strip_tiles.h ----

constexpr int level_bias(int most) { return most > 127 ? 128 : 0; }
constexpr int room(int) { return 8; }
constexpr bool kPartsAreWhole = true;

template <int Most, int P, int T>
inline void add_group(const I (&level)[P], const int8_t* const (&x)[T], I (&part)[P][T]) {
  const uint8x16_t flip = vdupq_n_u8(level_bias(Most));  // 128 off, as signed bytes
  int8x16_t a[T];
  for (int t = 0; t < T; ++t) a[t] = broadcast4(x[t]);
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int8x16_t rows = vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(level[p].v[q]), flip));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) part[p][t].v[q] = dot4(part[p][t].v[q], rows, a[t]);
    }
  }
}

template <int P, int T>
inline void fold(I (&part)[P][T], const I (&scale)[P], I (&total)[P][T]) {
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      total[p][t] = mul_add(part[p][t], scale[p], total[p][t]);
      part[p][t] = set(int32_t{0});
    }
  }
}

inline I add_products(I acc, I pairs, const int16_t* two) {
  const I first = each<I>([&](int i) { return vshrq_n_s32(vshlq_n_s32(pairs.v[i], 16), 16); });
  const I second = each<I>([&](int i) { return vshrq_n_s32(pairs.v[i], 16); });
  return mul_add(second, set(int32_t{two[1]}), mul_add(first, set(int32_t{two[0]}), acc));
}
inline I subtract(I x, I y) {
  return each<I>([&](int i) { return vsubq_s32(x.v[i], y.v[i]); });
}

constexpr int kTilePanels = 1, kTileTokens = 4, kStreamTokens = 4;
