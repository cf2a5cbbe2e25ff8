// Q4_K and Q5_K: 256 values in 144 and 176 bytes, eight sub-blocks of 32 with a 6-bit scale and a 6-bit minimum each.
//
// Block: f16 d, f16 dmin, 12 bytes of scales and minimums, for Q5_K 32 bytes of upper bits (bit s of byte k is that of
// value k of sub-block s), 128 bytes of the lower 4 bits. Scale j and minimum j, j < 4: the low 6 bits of bytes j and j
// + 4. j >= 4: the low and the high nibble of byte j + 4 are the low 4 bits of scale and minimum, their upper 2 bits
// are the top bits of bytes j - 4 and j. Lower bits per 64 values: byte i is q[i] | q[i + 32] << 4. value = d * scale *
// q - dmin * minimum.
//
// Panel block (2304 or 2816 bytes):
//      0  16 x f16 d, one per row            32  16 x f16 dmin
//     64  3 x 64 bytes, a 32-bit word per row: S0 at 64, S1 at 128, S2 at 192
//    256  8 sub-blocks, each a strip (strip.h) of 4 or 5 bits
// The low 6 bits of the four bytes of S0 are scales 0 2 1 3, of S1 scales 4 6 5 7, of S2 minimums 0 2 1 3; the top 2
// bits of the bytes of S0, S1, S2 are bits 0-1, 2-3, 4-5 of minimums 4 6 5 7. With even and odd bytes masked apart,
// each 32-bit lane holds two neighbours as 16-bit integers, ready for a multiply-add against pairs of activation sums.
#include <algorithm>
#include <cmath>

#include "quant/codec.h"
#include "quant/fit.h"
#include "quant/strip.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 256, kSub = 32, kSubs = 8;
constexpr uint32_t kScales = 4;  // offset in a block

struct Scales {
  uint8_t scale[kSubs];
  uint8_t min[kSubs];
};

Scales unpack_scales(const uint8_t* b) {
  Scales s;
  for (uint32_t j = 0; j < 4; ++j) {
    s.scale[j] = b[j] & 63;
    s.min[j] = b[j + 4] & 63;
    s.scale[j + 4] = static_cast<uint8_t>((b[j + 8] & 15) | (b[j] >> 6) << 4);
    s.min[j + 4] = static_cast<uint8_t>((b[j + 8] >> 4) | (b[j + 4] >> 6) << 4);
  }
  return s;
}

void pack_scales(const Scales& s, uint8_t* b) {
  for (uint32_t j = 0; j < 4; ++j) {
    b[j] = static_cast<uint8_t>(s.scale[j] | (s.scale[j + 4] >> 4) << 6);
    b[j + 4] = static_cast<uint8_t>(s.min[j] | (s.min[j + 4] >> 4) << 6);
    b[j + 8] = static_cast<uint8_t>((s.scale[j + 4] & 15) | (s.min[j + 4] & 15) << 4);
  }
}

constexpr uint32_t kByteOf[4] = {0, 2, 1, 3};  // the byte of a word that holds the j-th of four

void pack_panel_scales(const Scales& s, uint32_t lane, uint8_t* panel) {
  uint8_t* s0 = panel + 64 + 4 * lane;
  uint8_t* s1 = s0 + 64;
  uint8_t* s2 = s1 + 64;
  for (uint32_t j = 0; j < 4; ++j) {
    const uint32_t b = kByteOf[j], high = s.min[j + 4];
    s0[b] = static_cast<uint8_t>(s.scale[j] | (high & 3) << 6);
    s1[b] = static_cast<uint8_t>(s.scale[j + 4] | (high >> 2 & 3) << 6);
    s2[b] = static_cast<uint8_t>(s.min[j] | (high >> 4) << 6);
  }
}

Scales unpack_panel_scales(const uint8_t* panel, uint32_t lane) {
  const uint8_t* s0 = panel + 64 + 4 * lane;
  const uint8_t* s1 = s0 + 64;
  const uint8_t* s2 = s1 + 64;
  Scales s;
  for (uint32_t j = 0; j < 4; ++j) {
    const uint32_t b = kByteOf[j];
    s.scale[j] = s0[b] & 63;
    s.scale[j + 4] = s1[b] & 63;
    s.min[j] = s2[b] & 63;
    s.min[j + 4] = static_cast<uint8_t>(s0[b] >> 6 | (s1[b] >> 6) << 2 | (s2[b] >> 6) << 4);
  }
  return s;
}

uint8_t six_bits(float x) { return std::min<uint8_t>(63, static_cast<uint8_t>(round_even(x))); }

// d and dmin such that the largest scale and minimum become 63.
void scales_by_largest(const float* scale, const float* min, Scales* scales, uint8_t* block) {
  float max_scale = 0, max_min = 0;
  for (uint32_t s = 0; s < kSubs; ++s) {
    max_scale = std::max(max_scale, scale[s]);
    max_min = std::max(max_min, min[s]);
  }
  const float inverse_scale = max_scale > 0 ? 63.0f / max_scale : 0.0f;
  const float inverse_min = max_min > 0 ? 63.0f / max_min : 0.0f;
  for (uint32_t s = 0; s < kSubs; ++s) {
    scales->scale[s] = six_bits(inverse_scale * scale[s]);
    scales->min[s] = six_bits(inverse_min * min[s]);
  }
  store_u16(block, f32_to_f16(max_scale / 63.0f));
  store_u16(block + 2, f32_to_f16(max_min / 63.0f));
}

void weigh(const float* x, const float* importance, float* w, float* sums) {
  float sum = 0;
  for (uint32_t k = 0; k < kValues; ++k) sum += x[k] * x[k];
  importance_weights(x, importance, 2 * sum / kValues, kValues, w);
  for (uint32_t s = 0; s < kSubs; ++s) {
    sums[s] = 0;
    for (uint32_t k = 0; k < kSub; ++k) sums[s] += w[kSub * s + k];
  }
}

template <uint32_t Bits>
struct Blocks {
  static constexpr int32_t kMost = (1 << Bits) - 1;
  static constexpr uint32_t kHigh = 16, kLow = Bits == 5 ? 48 : 16, kBytes = kLow + 128;  // offsets in a block
  static constexpr AffineSearch kPlain =
      Bits == 4 ? AffineSearch{kMost, -1.0f, 0.1f, 20, false} : AffineSearch{kMost, -0.5f, 0.1f, 15, false};
  static constexpr AffineSearch kWeighted = {kMost, -0.9f, 0.05f, 36, false, true};

  static void encode(const float* x, const BlockFit& known, uint8_t* block) { encode_together(x, 1, known, block); }

  static void encode_together(const float* x, uint32_t count, const BlockFit& known, uint8_t* blocks) {
    AffineFit fit;
    float w[kMostTogether * kValues], sums[kMostTogether * kSubs];
    const bool weighted = known.importance != nullptr;
    FitInput in = {kSub, x, weighted ? w : nullptr, count * kSubs, false};
    for (uint32_t b = 0; weighted && b < count; ++b) {
      weigh(x + kValues * b, known.importance + kValues * b, w + kValues * b, sums + kSubs * b);
    }
    fitter().affine(in, weighted ? kWeighted : kPlain, &fit);
    Scales scales[kMostTogether];
    for (uint32_t b = 0; b < count; ++b) {
      uint8_t* block = blocks + kBytes * b;
      const float *scale = fit.scale + kSubs * b, *min = fit.min + kSubs * b;
      if (weighted) {
        store_u16(block, f32_to_f16(fit_scales(kSubs, 63, scale, sums + kSubs * b, scales[b].scale)));
        store_u16(block + 2, f32_to_f16(fit_scales(kSubs, 63, min, sums + kSubs * b, scales[b].min)));
      } else {
        scales_by_largest(scale, min, &scales[b], block);
      }
      pack_scales(scales[b], block + kScales);
      in.levels |= has_zero_step(block, scales[b]);
    }
    if (in.levels) fitter().affine(in, weighted ? kWeighted : kPlain, &fit);
    for (uint32_t b = 0; b < count; ++b) {
      round_again(x + kValues * b, blocks + kBytes * b, scales[b], fit.level + kValues * b);
      put_levels(fit.level + kValues * b, blocks + kBytes * b);
    }
  }

  static bool has_zero_step(const uint8_t* block, const Scales& scales) {
    const float d = f16_to_f32(load_u16(block));
    return std::any_of(scales.scale, scales.scale + kSubs,
                       [&](uint8_t scale) { return d * static_cast<float>(scale) == 0; });
  }

  // Levels again, for the scales as stored; where the stored scale is 0 the search's levels stay.
  static void round_again(const float* x, const uint8_t* block, const Scales& scales, uint8_t* level) {
    const float d = f16_to_f32(load_u16(block)), dmin = f16_to_f32(load_u16(block + 2));
    for (uint32_t s = 0; s < kSubs; ++s) {
      const float scale = d * static_cast<float>(scales.scale[s]);
      if (scale == 0) continue;
      const float min = dmin * static_cast<float>(scales.min[s]);
      fitter().round(x + kSub * s, kSub, min, scale, 0, kMost, reinterpret_cast<int8_t*>(level + kSub * s));
    }
  }

  static void put_levels(const uint8_t* level, uint8_t* block) {
    for (uint32_t s = 0; s < kSubs; s += 2) {
      const uint8_t* q = level + kSub * s;
      for (uint32_t k = 0; k < kSub; ++k) {
        block[kLow + 16 * s + k] = static_cast<uint8_t>((q[k] & 15) | (q[k + kSub] & 15) << 4);
      }
    }
    if (Bits == 4) return;
    for (uint32_t k = 0; k < kSub; ++k) {
      uint32_t bits = 0;
      for (uint32_t s = 0; s < kSubs; ++s) bits |= static_cast<uint32_t>(level[kSub * s + k] >> 4) << s;
      block[kHigh + k] = static_cast<uint8_t>(bits);
    }
  }

  static void get_levels(const uint8_t* block, uint8_t* level) {
    for (uint32_t s = 0; s < kSubs; s += 2) {
      uint8_t* q = level + kSub * s;
      for (uint32_t k = 0; k < kSub; ++k) {
        const uint8_t low = block[kLow + 16 * s + k];
        q[k] = low & 15;
        q[k + kSub] = low >> 4;
      }
    }
    if (Bits == 4) return;
    for (uint32_t s = 0; s < kSubs; ++s) {
      for (uint32_t k = 0; k < kSub; ++k) {
        level[kSub * s + k] = static_cast<uint8_t>(level[kSub * s + k] | (block[kHigh + k] >> s & 1) << 4);
      }
    }
  }

  static void levels(const uint8_t* block, Levels* out) {
    out->d = f16_to_f32(load_u16(block));
    out->dmin = f16_to_f32(load_u16(block + 2));
    out->sub = kSub;
    out->has_min = true;
    const Scales scales = unpack_scales(block + kScales);
    std::copy(scales.scale, scales.scale + kSubs, out->scale);
    std::copy(scales.min, scales.min + kSubs, out->min);
    uint8_t level[kValues];
    get_levels(block, level);
    std::copy(level, level + kValues, out->q);
  }

  static void decode(const uint8_t* block, float* x) {
    const float d = f16_to_f32(load_u16(block)), dmin = f16_to_f32(load_u16(block + 2));
    const Scales scales = unpack_scales(block + kScales);
    uint8_t level[kValues];
    get_levels(block, level);
    for (uint32_t s = 0; s < kSubs; ++s) {
      const float scale = d * static_cast<float>(scales.scale[s]), min = dmin * static_cast<float>(scales.min[s]);
      fitter().spread(level + kSub * s, kSub, scale, min, x + kSub * s);
    }
  }

  static void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
    store_u16(panel + 2 * lane, load_u16(block));
    store_u16(panel + 32 + 2 * lane, load_u16(block + 2));
    pack_panel_scales(unpack_scales(block + kScales), lane, panel);
    uint8_t level[kValues];
    get_levels(block, level);
    for (uint32_t s = 0; s < kSubs; ++s) put_strip(Bits, level + kSub * s, lane, panel + 256 + strip_bytes(Bits) * s);
  }

  static void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
    store_u16(block, load_u16(panel + 2 * lane));
    store_u16(block + 2, load_u16(panel + 32 + 2 * lane));
    pack_scales(unpack_panel_scales(panel, lane), block + kScales);
    uint8_t level[kValues];
    for (uint32_t s = 0; s < kSubs; ++s) get_strip(Bits, panel + 256 + strip_bytes(Bits) * s, lane, level + kSub * s);
    put_levels(level, block);
  }

  static constexpr Codec codec(const char* name) {
    return {{name, kValues, kBytes, false}, encode, decode, levels, pack, unpack, encode_together};
  }
};

}  // namespace

const Codec kCodecQ4_K = Blocks<4>::codec("q4_k");
const Codec kCodecQ5_K = Blocks<5>::codec("q5_k");

}  // namespace smoe
