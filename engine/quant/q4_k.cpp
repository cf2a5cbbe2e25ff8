// Q4_K: 256 values in 144 bytes, eight sub-blocks of 32 with a 6-bit scale and a 6-bit minimum each.
//
// Block: f16 d, f16 dmin, 12 bytes of scales and minimums, 128 bytes of quants. Scale j and minimum j, j < 4: the low 6
// bits of bytes j and j + 4. j >= 4: the low and the high nibble of byte j + 4 are the low 4 bits of scale and minimum,
// their upper 2 bits are the top bits of bytes j - 4 and j. Quants per 64 values: byte i is q[i] | q[i + 32] << 4.
// value = d * scale * q - dmin * minimum.
//
// Panel block (2304 bytes = 36 x 64):
//      0  16 x f16 d, one per row            32  16 x f16 dmin
//     64  3 x 64 bytes, a 32-bit word per row: S0 at 64, S1 at 128, S2 at 192
//    256  8 sub-blocks x 4 groups x 64 bytes of quants
// The low 6 bits of the four bytes of S0 are scales 0 2 1 3, of S1 scales 4 6 5 7, of S2 minimums 0 2 1 3; the top 2
// bits of the bytes of S0, S1, S2 are bits 0-1, 2-3, 4-5 of minimums 4 6 5 7. With even and odd bytes masked apart,
// each 32-bit lane holds two neighbours as 16-bit integers, ready for a multiply-add against pairs of activation sums.
// Quants: byte 4 * row + i of group g of sub-block s is q[32s + 4g + i] | q[32s + 16 + 4g + i] << 4 of that row.
#include <algorithm>

#include "quant/codec.h"
#include "quant/fit.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 256, kBytes = 144, kSub = 32, kSubs = 8;
constexpr uint32_t kScales = 4, kQuants = 16;  // offsets in a block

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

uint8_t six_bits(float x) { return std::min<uint8_t>(63, static_cast<uint8_t>(round_even(x))); }

// Levels again, for the scales as stored; where the stored scale is 0 the search's levels stay.
void round_again(const float* x, const uint8_t* block, const Scales& scales, uint8_t* level) {
  const float d = f16_to_f32(load_u16(block)), dmin = f16_to_f32(load_u16(block + 2));
  for (uint32_t s = 0; s < kSubs; ++s) {
    const float scale = d * static_cast<float>(scales.scale[s]);
    if (scale == 0) continue;
    const float min = dmin * static_cast<float>(scales.min[s]);
    for (uint32_t k = kSub * s; k < kSub * (s + 1); ++k) {
      level[k] = static_cast<uint8_t>(std::clamp(round_even((x[k] + min) / scale), 0, 15));
    }
  }
}

void encode(const float* x, uint8_t* block) {
  Q4KFit fit;
  fit_q4_k(x, &fit);
  float max_scale = 0, max_min = 0;
  for (uint32_t s = 0; s < kSubs; ++s) {
    max_scale = std::max(max_scale, fit.scale[s]);
    max_min = std::max(max_min, fit.min[s]);
  }
  const float inverse_scale = max_scale > 0 ? 63.0f / max_scale : 0.0f;
  const float inverse_min = max_min > 0 ? 63.0f / max_min : 0.0f;
  Scales scales;
  for (uint32_t s = 0; s < kSubs; ++s) {
    scales.scale[s] = six_bits(inverse_scale * fit.scale[s]);
    scales.min[s] = six_bits(inverse_min * fit.min[s]);
  }
  store_u16(block, f32_to_f16(max_scale / 63.0f));
  store_u16(block + 2, f32_to_f16(max_min / 63.0f));
  pack_scales(scales, block + kScales);
  round_again(x, block, scales, fit.level);
  for (uint32_t s = 0; s < kSubs; s += 2) {
    const uint8_t* level = fit.level + kSub * s;
    for (uint32_t k = 0; k < kSub; ++k) {
      block[kQuants + 16 * s + k] = static_cast<uint8_t>(level[k] | level[k + kSub] << 4);
    }
  }
}

uint8_t quant(const uint8_t* block, uint32_t s, uint32_t k) {
  const uint8_t byte = block[kQuants + 32 * (s / 2) + k];
  return s % 2 == 0 ? byte & 15 : byte >> 4;
}

void decode(const uint8_t* block, float* x) {
  const float d = f16_to_f32(load_u16(block)), dmin = f16_to_f32(load_u16(block + 2));
  const Scales scales = unpack_scales(block + kScales);
  for (uint32_t s = 0; s < kSubs; ++s) {
    const float scale = d * static_cast<float>(scales.scale[s]), min = dmin * static_cast<float>(scales.min[s]);
    for (uint32_t k = 0; k < kSub; ++k) x[kSub * s + k] = scale * static_cast<float>(quant(block, s, k)) - min;
  }
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block));
  out->dmin = f16_to_f32(load_u16(block + 2));
  out->sub = kSub;
  out->has_min = true;
  const Scales scales = unpack_scales(block + kScales);
  for (uint32_t s = 0; s < kSubs; ++s) {
    out->scale[s] = scales.scale[s];
    out->min[s] = scales.min[s];
    for (uint32_t k = 0; k < kSub; ++k) out->q[kSub * s + k] = static_cast<int8_t>(quant(block, s, k));
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

uint32_t at(uint32_t lane, uint32_t s, uint32_t j) { return 256 + (4 * s + j / 4) * 64 + lane * 4 + j % 4; }

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block));
  store_u16(panel + 32 + 2 * lane, load_u16(block + 2));
  pack_panel_scales(unpack_scales(block + kScales), lane, panel);
  for (uint32_t s = 0; s < kSubs; ++s) {
    for (uint32_t j = 0; j < 16; ++j) {
      panel[at(lane, s, j)] = static_cast<uint8_t>(quant(block, s, j) | quant(block, s, j + 16) << 4);
    }
  }
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block, load_u16(panel + 2 * lane));
  store_u16(block + 2, load_u16(panel + 32 + 2 * lane));
  pack_scales(unpack_panel_scales(panel, lane), block + kScales);
  for (uint32_t s = 0; s < kSubs; s += 2) {
    for (uint32_t k = 0; k < kSub; ++k) {
      const uint32_t shift = k < 16 ? 0 : 4;
      const uint32_t low = panel[at(lane, s, k % 16)] >> shift & 15,
                     high = panel[at(lane, s + 1, k % 16)] >> shift & 15;
      block[kQuants + 16 * s + k] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

}  // namespace

const Codec kCodecQ4_K = {{"q4_k", kValues, kBytes, false}, encode, decode, levels, pack, unpack};

}  // namespace smoe
