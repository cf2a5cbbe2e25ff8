// How the panels of the encodings made of strips (quant/strip.h) are read, written once over the sixteen-lane
// vocabulary: a format gives the levels of group after group, unsigned, and the scales of its sub-blocks. Included
// after lanes_<isa>.h and lanes_kernels.h. Everything else about a format is in its file in engine/quant.

// N positive: right; negative: left.
template <int N>
inline I shifted(I x) {
  if constexpr (N == 0) return x;
  if constexpr (N > 0) return shift_right<N>(x);
  if constexpr (N < 0) return shift_left<-N>(x);
}

inline I every_byte(uint8_t x) { return set(static_cast<int32_t>(0x01010101u * x)); }

// The steps through a strip's eight groups, in the order in which the planes hold them: the column where step i begins.
template <int Bits>
constexpr size_t step_column(int step) {
  const int group = Bits >= 4 && Bits <= 6 ? step / 2 + 4 * (step % 2) : step;
  return static_cast<size_t>(4 * group);
}

// The levels of step i: four columns of sixteen rows, a byte each.
template <int Bits, int Step>
inline I strip_group(const uint8_t* p) {
  constexpr int kGroup = static_cast<int>(step_column<Bits>(Step) / 4);
  if constexpr (Bits == 8) {
    return load_int(p + 64 * Step);
  } else if constexpr (Bits >= 4) {
    const I low = bit_and(shifted<4 * (Step % 2)>(load_int(p + 64 * (Step / 2))), every_byte(15));
    if constexpr (Bits == 4) return low;
    if constexpr (Bits == 5) {
      return bit_or(low, bit_and(shifted<kGroup - 4>(load_int(p + 256)), every_byte(16)));
    } else {
      const I high = load_int(p + 256 + 64 * (kGroup / 4));
      return bit_or(low, bit_and(shifted<2 * (kGroup % 4) - 4>(high), every_byte(48)));
    }
  } else {
    const I low = bit_and(shifted<2 * (Step % 4)>(load_int(p + 64 * (Step / 4))), every_byte(3));
    if constexpr (Bits == 2) return low;
    return bit_or(low, bit_and(shifted<Step - 2>(load_int(p + 128)), every_byte(4)));
  }
}

inline F scales_at(const uint8_t* p) { return widen_f16(load_16(reinterpret_cast<const uint16_t*>(p))); }

// ---- one scale for a block of one strip or several: value = scale * (level - kOffset) + base ----

// What those of one strip share. Formats are objects, for what is known only when they run.
template <class Levels>
struct OneStrip : Levels {
  explicit OneStrip(Encoding) {}
  static constexpr size_t strips() { return 1; }
};

// Levels as they are stored.
template <int Bits>
struct PlainLevels {
  static constexpr int kBits = Bits, kMost = (1 << Bits) - 1;
  template <int Step>
  static I level(const uint8_t* strip) {
    return strip_group<Bits, Step>(strip);
  }
};

// Four-bit indices into a table of unsigned levels.
template <const uint8_t (&Table)[16], int Most>
struct TableLevels {
  static constexpr int kBits = 4, kMost = Most;
  template <int Step>
  static I level(const uint8_t* strip) {
    return look_up(Table, strip_group<4, Step>(strip));
  }
};

alignas(16) constexpr uint8_t kUnevenTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                  129, 141, 153, 166, 181, 197, 217, 241};  // quant/uneven.h + 128
alignas(16) constexpr uint8_t kFp4Table[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                               16, 15, 14, 13, 12, 10, 8,  4};  // kTwice of quant/mxfp4.cpp + 16

struct Q4_1 : OneStrip<PlainLevels<4>> {
  using OneStrip::OneStrip;
  static constexpr size_t block() { return 320; }
  static constexpr size_t header() { return 64; }
  static constexpr int kOffset = 0;
  static constexpr bool kMin = true;
  static F scale(const uint8_t* w) { return scales_at(w); }
  static F base(const uint8_t* w) { return scales_at(w + 32); }
};

struct Q5_0 : OneStrip<PlainLevels<5>> {
  using OneStrip::OneStrip;
  static constexpr size_t block() { return 352; }
  static constexpr size_t header() { return 32; }
  static constexpr int kOffset = 16;
  static constexpr bool kMin = false;
  static F scale(const uint8_t* w) { return scales_at(w); }
  static F base(const uint8_t*) { return set(0.0f); }
};

struct Q5_1 : OneStrip<PlainLevels<5>> {
  using OneStrip::OneStrip;
  static constexpr size_t block() { return 384; }
  static constexpr size_t header() { return 64; }
  static constexpr int kOffset = 0;
  static constexpr bool kMin = true;
  static F scale(const uint8_t* w) { return scales_at(w); }
  static F base(const uint8_t* w) { return scales_at(w + 32); }
};

struct Iq4Nl : OneStrip<TableLevels<kUnevenTable, 241>> {
  using OneStrip::OneStrip;
  static constexpr size_t block() { return 288; }
  static constexpr size_t header() { return 32; }
  static constexpr int kOffset = 128;
  static constexpr bool kMin = false;
  static F scale(const uint8_t* w) { return scales_at(w); }
  static F base(const uint8_t*) { return set(0.0f); }
};

struct Mxfp4 : OneStrip<TableLevels<kFp4Table, 28>> {
  using OneStrip::OneStrip;
  static constexpr size_t block() { return 272; }
  static constexpr size_t header() { return 16; }
  static constexpr int kOffset = 16;
  static constexpr bool kMin = false;
  // 2^(e - 128): e - 1 as the exponent, but for e 0 and 1 the subnormal 2^21 << e.
  static F scale(const uint8_t* w) {
    const I e = bit_and(widen_i8(w), set(255)), low = min(e, set(2));
    const I normal = max(shift_left<23>(add(e, set(-1))), set(0));
    const I subnormal = bit_and(shift_left<21>(add(low, set(1))), add(shift_right<1>(low), set(-1)));
    return as_float(bit_or(normal, subnormal));
  }
  static F base(const uint8_t*) { return set(0.0f); }
};

template <int Bits>
struct Mlx : PlainLevels<Bits> {
  static constexpr int kOffset = 0;
  static constexpr bool kMin = true;
  MlxFormat format;
  size_t scale_bytes;
  explicit Mlx(Encoding e) : format(mlx_format(e)), scale_bytes(format.scales == Encoding::f32 ? 64 : 32) {}
  size_t strips() const { return format.group / 32; }
  size_t header() const { return 2 * scale_bytes; }
  size_t block() const { return header() + 64 * Bits * strips(); }
  F scale(const uint8_t* w) const {
    if (format.scales == Encoding::f32) return load(reinterpret_cast<const float*>(w));
    const auto* h = reinterpret_cast<const uint16_t*>(w);
    return format.scales == Encoding::f16 ? widen_f16(load_16(h)) : widen_bf16(load_16(h));
  }
  F base(const uint8_t* w) const { return scale(w + scale_bytes); }
};

// ---- super-blocks: value = d * scale * (level - kOffset) - dmin * min, sub-blocks of kSub columns, kMin or not ----

struct SubScales {
  I scale[16], min[16];
};

struct PanelScales {
  I scale[8], min[8];
};

// The 6-bit scales and minimums of a Q4_K or Q5_K panel block, see quant/q4_k.cpp.
inline PanelScales scales_q4_k(const uint8_t* panel) {
  const I s0 = load_int(panel + 64), s1 = load_int(panel + 128), s2 = load_int(panel + 192);
  const I top = set(0x03030303), mask = set(63);
  const I high = bit_or(bit_and(shift_right<6>(s0), top), bit_or(shift_left<2>(bit_and(shift_right<6>(s1), top)),
                                                                 shift_left<4>(bit_and(shift_right<6>(s2), top))));
  const auto unpack = [&](I word, I* out) {  // bytes 0 2 1 3
    out[0] = bit_and(word, mask);
    out[1] = bit_and(shift_right<16>(word), mask);
    out[2] = bit_and(shift_right<8>(word), mask);
    out[3] = bit_and(shift_right<24>(word), mask);
  };
  PanelScales s;
  unpack(s0, s.scale);
  unpack(s1, s.scale + 4);
  unpack(s2, s.min);
  unpack(high, s.min + 4);
  return s;
}

// N 6-bit scales, 32 taken off: low halves two to a byte, upper quarters four to a byte.
template <int N>
inline void signed_scales(const uint8_t* low, const uint8_t* high, SubScales* out) {
#pragma GCC unroll 4
  for (int i = 0; i < N; i += 4) {
    const I bits = widen_i8(high + 4 * i), first = widen_i8(low + 8 * i), second = widen_i8(low + 8 * i + 16);
    const I four = set(15), two = set(48), zero = set(-32);
    out->scale[i] = add(bit_or(bit_and(first, four), bit_and(shift_left<4>(bits), two)), zero);
    out->scale[i + 1] = add(bit_or(bit_and(shift_right<4>(first), four), bit_and(shift_left<2>(bits), two)), zero);
    out->scale[i + 2] = add(bit_or(bit_and(second, four), bit_and(bits, two)), zero);
    out->scale[i + 3] = add(bit_or(bit_and(shift_right<4>(second), four), bit_and(shift_right<2>(bits), two)), zero);
  }
}

struct Q5_K : PlainLevels<5> {
  static constexpr size_t kBlock = 2816, kStrips = 256, kSub = 32;
  static constexpr int kOffset = 0;
  static constexpr bool kMin = true;
  static void scales(const uint8_t* w, SubScales* out) {
    const PanelScales found = scales_q4_k(w);
    for (int s = 0; s < 8; ++s) {
      out->scale[s] = found.scale[s];
      out->min[s] = found.min[s];
    }
  }
};

struct Q2_K : PlainLevels<2> {
  static constexpr size_t kBlock = 1344, kStrips = 320, kSub = 16;
  static constexpr int kOffset = 0;
  static constexpr bool kMin = true;
  static void scales(const uint8_t* w, SubScales* out) {
    for (int s = 0; s < 16; ++s) {
      const I both = widen_i8(w + 64 + 16 * s);
      out->scale[s] = bit_and(both, set(15));
      out->min[s] = bit_and(shift_right<4>(both), set(15));
    }
  }
};

struct Q3_K : PlainLevels<3> {
  static constexpr size_t kBlock = 1760, kStrips = 224, kSub = 16;
  static constexpr int kOffset = 4;
  static constexpr bool kMin = false;
  static void scales(const uint8_t* w, SubScales* out) { signed_scales<16>(w + 32, w + 160, out); }
};

struct Iq4Xs : TableLevels<kUnevenTable, 241> {
  static constexpr size_t kBlock = 2176, kStrips = 128, kSub = 32;
  static constexpr int kOffset = 128;
  static constexpr bool kMin = false;
  static void scales(const uint8_t* w, SubScales* out) { signed_scales<8>(w + 32, w + 96, out); }
};

template <class Visitor>
inline auto visit_mlx(Encoding e, Visitor&& f) {
  switch (mlx_format(e).bits) {
    case 2:
      return f.template one<Mlx<2>>();
    case 3:
      return f.template one<Mlx<3>>();
    case 4:
      return f.template one<Mlx<4>>();
    case 5:
      return f.template one<Mlx<5>>();
    case 6:
      return f.template one<Mlx<6>>();
    default:
      return f.template one<Mlx<8>>();
  }
}

// f.one<E>() for an encoding with one scale a block, f.super<E>() for one of super-blocks.
template <class Visitor>
inline auto visit_strips(Encoding e, Visitor&& f) {
  switch (e) {
    case Encoding::q4_1:
      return f.template one<Q4_1>();
    case Encoding::q5_0:
      return f.template one<Q5_0>();
    case Encoding::q5_1:
      return f.template one<Q5_1>();
    case Encoding::iq4_nl:
      return f.template one<Iq4Nl>();
    case Encoding::mxfp4:
      return f.template one<Mxfp4>();
    case Encoding::q2_k:
      return f.template super<Q2_K>();
    case Encoding::q3_k:
      return f.template super<Q3_K>();
    case Encoding::iq4_xs:
      return f.template super<Iq4Xs>();
    case Encoding::q5_k:
      return f.template super<Q5_K>();
    default:
      return visit_mlx(e, f);
  }
}
