// Tiles of the encodings made of strips, P panels times T tokens, written once over the sixteen-lane vocabulary and
// these words of each ISA, which come first:
//   level_bias(most)   taken off levels up to `most` before they are multiplied: 128 where the ISA multiplies signed
//   bytes room(most)         groups of such levels whose products a part holds; 8 = any number of them kPartsAreWhole
//   whether a part is an I of whole sums, so that it can be the total too add_group<Most>(level, activations, part)
//   part[p][t] += level[p] . four activations of token t fold(part, scale, total)   total[p][t] += scale[p] *
//   part[p][t];   fold(part, total)   with scale 1 add_products(acc, pairs, two)   acc + the pair of 16-bit integers of
//   each lane times two 16-bit integers prefetch(p, bytes)

template <int P, int T>
inline void clear_ints(I (&x)[P][T]) {
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) x[p][t] = set(int32_t{0});
  }
}

template <int P, int T>
inline void clear_floats(F (&x)[P][T]) {
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) x[p][t] = set(0.0f);
  }
}

template <int P, int T>
inline void put_tile(const F (&acc)[P][T], float* out) {
  for (int p = 0; p < P; ++p) {
    for (int t = 0; t < T; ++t) store(out + static_cast<size_t>(p * T + t) * kLanes, acc[p][t]);
  }
}

// The levels of one step of a strip in P panels, times the activations of T tokens from `x` on.
template <class E, int Step, int P, int T>
inline void step_group(const uint8_t* strip, size_t panel, const int8_t* const (&x)[T], I (&part)[P][T]) {
  I level[P];
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p) level[p] = E::template level<Step>(strip + static_cast<size_t>(p) * panel);
  const int8_t* at[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) at[t] = x[t] + step_column<E::kBits>(Step);
  add_group<E::kMost>(level, at, part);
}

// total[p][t] += the strip's products, from step `Step` on.
template <class E, int P, int T, int Step = 0>
inline void add_strip(const uint8_t* strip, size_t panel, const int8_t* const (&x)[T], I (&part)[P][T],
                      I (&total)[P][T]) {
  if constexpr (kPartsAreWhole) {
    step_group<E, Step>(strip, panel, x, total);
  } else {
    step_group<E, Step>(strip, panel, x, part);
    if constexpr ((Step + 1) % room(E::kMost) == 0) fold(part, total);
  }
  if constexpr (Step < 7) add_strip<E, P, T, Step + 1>(strip, panel, x, part, total);
}

// The same with a scale for each sub-block of the strip: scales[p][sub-block].
template <class E, int P, int T, int Step = 0>
inline void add_scaled_strip(const uint8_t* strip, size_t panel, const int8_t* const (&x)[T], const I (&scales)[2][P],
                             I (&part)[P][T], I (&total)[P][T]) {
  constexpr int kSteps = static_cast<int>(E::kSub / 4);  // in a sub-block
  constexpr int kRoom = room(E::kMost) < kSteps ? room(E::kMost) : kSteps;
  step_group<E, Step>(strip, panel, x, part);
  if constexpr ((Step + 1) % kRoom == 0) fold(part, scales[Step / kSteps], total);
  if constexpr (Step < 7) add_scaled_strip<E, P, T, Step + 1>(strip, panel, x, scales, part, total);
}

// What the sum of 32 unsigned products starts from, so that the offset is off in the end.
template <int Offset>
inline int32_t start_of(const Act32& act) {
  static_assert(Offset == 0 || Offset == 16 || Offset == 128 || Offset == -128);
  if constexpr (Offset == 16) return act.start16;
  if constexpr (Offset == 128) return act.start128;
  if constexpr (Offset == -128) return -act.start128;
  return 0;
}

template <class E>
struct OneScaleTile {
  template <int P, int T>
  static void tile(const Tile& job) {
    const E format(job.encoding);
    const Act32* act[T];
    act_pointers(job, act);
    F acc[P][T];
    clear_floats(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += format.block()) {
      if (job.ahead) prefetch(w, format.block());
      F d[P], base[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        d[p] = format.scale(w + static_cast<size_t>(p) * job.panel);
        base[p] = mul(format.base(w + static_cast<size_t>(p) * job.panel), set(-0.125f));
      }
      for (size_t s = 0; s < format.strips(); ++s) {
        const uint8_t* strip = w + format.header() + 64 * E::kBits * s;
        add_scaled<P, T>(strip, job.panel, act, b * format.strips() + s, d, base, acc);
      }
    }
    put_tile(acc, job.out);
  }

  // acc += scale d_a (levels . activations) + base d_a sum, of which start8 is -8 times the sum and `base` the -8th
  // part
  template <int P, int T>
  [[gnu::always_inline]] static inline void add_scaled(const uint8_t* strip, size_t panel, const Act32* const (&act)[T],
                                                       size_t k, const F (&d)[P], const F (&base)[P], F (&acc)[P][T]) {
    I part[P][T], total[P][T];
    const int8_t* x[T];
    clear_ints(part);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      x[t] = act[t][k].q;
      const I start = set(start_of<E::kOffset - level_bias(E::kMost)>(act[t][k]));
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) total[p][t] = start;
    }
    add_strip<E, P, T>(strip, panel, x, part, total);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const F da = set(act[t][k].d), eighths = to_float(set(act[t][k].start8));
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        acc[p][t] = fma(to_float(total[p][t]), mul(d[p], da), acc[p][t]);
        if constexpr (E::kMin) acc[p][t] = fma(eighths, mul(base[p], da), acc[p][t]);
      }
    }
  }
};

template <class E>
struct SuperBlockTile {
  static constexpr size_t kBlock = E::kBlock, kEach = 32 / E::kSub;
  static constexpr int kOffset = E::kOffset - level_bias(E::kMost);

  template <int P, int T>
  static void tile(const Tile& job) {
    const Act256* act[T];
    act_pointers(job, act);
    F acc[P][T];
    clear_floats(acc);
    const uint8_t* w = job.w;
    for (size_t b = 0; b < job.blocks; ++b, w += kBlock) {
      if (job.ahead) prefetch(w, E::kStrips);
      SubScales scales[P];
      for (int p = 0; p < P; ++p) E::scales(w + static_cast<size_t>(p) * job.panel, &scales[p]);
      I part[P][T], total[P][T];
      clear_ints(part);
      clear_ints(total);
#pragma GCC unroll 1  // unrolled, GCC puts off the additions to `total` and spills what they wait for
      for (size_t s = 0; s < 8; ++s) {
        const uint8_t* strip = w + E::kStrips + 64 * E::kBits * s;
        if (job.ahead) prefetch(strip, 64 * E::kBits);
        const int8_t* x[T];
        for (int t = 0; t < T; ++t) x[t] = act[t][b].q + 32 * s;
        I scale[2][P];
        for (size_t i = 0; i < kEach; ++i) {
          for (int p = 0; p < P; ++p) scale[i][p] = scales[p].scale[kEach * s + i];
        }
        add_scaled_strip<E, P, T>(strip, job.panel, x, scale, part, total);
      }
      finish(w, job.panel, act, b, scales, total, acc);
    }
    put_tile(acc, job.out);
  }

  // Sums over sub-blocks of a factor (a scale or a minimum) times the activations' sum.
  static inline I weighted_sums(const I* factor, const Act256& act) {
    const int16_t* sums = E::kSub == 16 ? act.sum16 : act.sum32;
    I all = set(int32_t{0});
#pragma GCC unroll 8
    for (size_t s = 0; s < 256 / E::kSub; s += 2) {
      const I pair = bit_or(bit_and(factor[s], set(0xffff)), shift_left<16>(factor[s + 1]));
      all = add_products(all, pair, sums + s);
    }
    return all;
  }

  // acc += d d_a (total - offset (scales . sums)) - dmin d_a (minimums . sums)
  template <int P, int T>
  static inline void finish(const uint8_t* w, size_t panel, const Act256* const (&act)[T], size_t b,
                            const SubScales (&scales)[P], const I (&total)[P][T], F (&acc)[P][T]) {
    for (int p = 0; p < P; ++p) {
      const uint8_t* block = w + static_cast<size_t>(p) * panel;
      const F d = scales_at(block);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const F da = set(act[t][b].d);
        I whole = total[p][t];
        if constexpr (kOffset != 0) whole = subtract(whole, times<kOffset>(weighted_sums(scales[p].scale, act[t][b])));
        acc[p][t] = fma(to_float(whole), mul(d, da), acc[p][t]);
        if constexpr (E::kMin) {
          const F mins = to_float(weighted_sums(scales[p].min, act[t][b]));
          acc[p][t] = fnma(mins, mul(scales_at(block + 32), da), acc[p][t]);
        }
      }
    }
  }

  template <int N>
  static inline I times(I x) {
    static_assert(N == 4 || N == 128);
    return N == 4 ? shift_left<2>(x) : shift_left<7>(x);
  }
};

struct StripTiles {  // see visit_strips
  const PanelCall& call;
  size_t tokens;
  template <class E>
  void one() const {
    run_matrix<OneScaleTile<E>>(call, tokens);
  }
  template <class E>
  void super() const {
    run_matrix<SuperBlockTile<E>>(call, tokens);
  }
};
