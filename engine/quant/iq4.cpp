// IQ4_NL, 32 values in 18 bytes, and IQ4_XS, 256 in 136: four-bit indices into sixteen uneven levels (uneven.h).
//
// IQ4_NL block: f16 d, then 16 bytes, byte j is q[j] | q[j + 16] << 4. value = d * kUneven[q].
// Panel block (288 bytes): 16 x f16 d, one per row; a strip (strip.h) of 4 bits.
//
// IQ4_XS block: f16 d, u16 with the upper two bits of eight 6-bit scales (2s of scale s), 4 bytes with their lower four
// (low nibble first), 128 bytes of quants: of each sub-block of 32, byte j is q[j] | q[j + 16] << 4.
// value = d * (scale - 32) * kUneven[q].
// Panel block (2176 bytes):
//      0  16 x f16 d, one per row
//     32  4 x 16 bytes, one per row: low 4 bits of scales 2i and 2i + 1, the latter above
//     96  2 x 16 bytes: upper two bits of scales 4i to 4i + 3, lowest first
//    128  8 strips of 4 bits, one a sub-block
#include <algorithm>
#include <cmath>

#include "quant/codec.h"
#include "quant/fit.h"
#include "quant/strip.h"
#include "quant/uneven.h"

namespace smoe {
namespace {

constexpr uint32_t kSub = 32;

// Weights of a block of n values: x^2, or what their importance makes of it.
void weigh(const float* x, const BlockFit& fit, uint32_t n, float* w) {
  float sum = 0;
  for (uint32_t k = 0; k < n; ++k) {
    w[k] = x[k] * x[k];
    sum += w[k];
  }
  if (fit.importance != nullptr) importance_weights(x, fit.importance, sum * (2.0f / static_cast<float>(n)), n, w);
}

namespace nl {

constexpr uint32_t kBytes = 18;

void encode(const float* x, const BlockFit& fit, uint8_t* block) {
  // One of the search's eight lanes is used.
  float values[8 * kSub] = {}, w[8 * kSub] = {}, scale[8];
  std::copy(x, x + kSub, values);
  weigh(x, fit, kSub, w);
  fit_uneven({kSub, values, w}, scale);
  store_u16(block, f32_to_f16(scale[0]));
  const float inverse = scale[0] == 0 ? 0.0f : 1.0f / scale[0];
  uint8_t level[kSub];
  for (uint32_t k = 0; k < kSub; ++k) level[k] = nearest_uneven(inverse * x[k]);
  put_nibbles(level, block + 2);
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block));
  out->sub = kSub;
  uint8_t level[kSub];
  get_nibbles(block + 2, level);
  for (uint32_t k = 0; k < kSub; ++k) out->q[k] = kUneven[level[k]];
}

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block));
  uint8_t level[kSub];
  get_nibbles(block + 2, level);
  put_strip(4, level, lane, panel + 32);
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block, load_u16(panel + 2 * lane));
  uint8_t level[kSub];
  get_strip(4, panel + 32, lane, level);
  put_nibbles(level, block + 2);
}

}  // namespace nl

namespace xs {

constexpr uint32_t kValues = 256, kSubs = 8, kBytes = 136;
constexpr uint32_t kHigh = 2, kLow = 4, kQuants = 8;  // offsets in a block
constexpr uint32_t kPanelLow = 32, kPanelHigh = 96, kPanelStrips = 128;

void put_scales(const uint8_t* scale, uint8_t* block) {  // eight of 0..63
  std::fill(block + kHigh, block + kQuants, static_cast<uint8_t>(0));
  for (uint32_t s = 0; s < kSubs; ++s) {
    uint8_t& low = block[kLow + s / 2];
    uint8_t& high = block[kHigh + s / 4];
    low = static_cast<uint8_t>(low | (scale[s] & 15) << 4 * (s % 2));
    high = static_cast<uint8_t>(high | (scale[s] >> 4) << 2 * (s % 4));
  }
}

uint8_t scale_at(const uint8_t* block, uint32_t s) {
  return static_cast<uint8_t>((block[kLow + s / 2] >> 4 * (s % 2) & 15) | (block[kHigh + s / 4] >> 2 * (s % 4) & 3)
                                                                              << 4);
}

void encode(const float* x, const BlockFit& known, uint8_t* block) {
  float w[kValues], fitted[kSubs], extreme = 0;
  weigh(x, known, kValues, w);
  fit_uneven({kSub, x, w}, fitted);
  for (const float scale : fitted) {
    if (std::fabs(scale) > std::fabs(extreme)) extreme = scale;
  }
  const float d = -extreme / 32;
  const float inverse = d == 0 ? 0.0f : 1.0f / d;
  store_u16(block, f32_to_f16(d));
  uint8_t scale[kSubs], level[kSub];
  for (uint32_t s = 0; s < kSubs; ++s) {
    const int32_t rounded = std::clamp(round_even(inverse * fitted[s]), -32, 31);
    scale[s] = static_cast<uint8_t>(rounded + 32);
    const float step = d * static_cast<float>(rounded), per = step == 0 ? 0.0f : 1.0f / step;
    for (uint32_t k = 0; k < kSub; ++k) level[k] = nearest_uneven(per * x[kSub * s + k]);
    put_nibbles(level, block + kQuants + 16 * s);
  }
  put_scales(scale, block);
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block));
  out->sub = kSub;
  for (uint32_t s = 0; s < kSubs; ++s) {
    out->scale[s] = static_cast<int16_t>(scale_at(block, s) - 32);
    uint8_t level[kSub];
    get_nibbles(block + kQuants + 16 * s, level);
    for (uint32_t k = 0; k < kSub; ++k) out->q[kSub * s + k] = kUneven[level[k]];
  }
}

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block));
  for (uint32_t i = 0; i < 4; ++i) panel[kPanelLow + 16 * i + lane] = block[kLow + i];
  for (uint32_t i = 0; i < 2; ++i) panel[kPanelHigh + 16 * i + lane] = block[kHigh + i];
  for (uint32_t s = 0; s < kSubs; ++s) {
    uint8_t level[kSub];
    get_nibbles(block + kQuants + 16 * s, level);
    put_strip(4, level, lane, panel + kPanelStrips + strip_bytes(4) * s);
  }
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block, load_u16(panel + 2 * lane));
  for (uint32_t i = 0; i < 4; ++i) block[kLow + i] = panel[kPanelLow + 16 * i + lane];
  for (uint32_t i = 0; i < 2; ++i) block[kHigh + i] = panel[kPanelHigh + 16 * i + lane];
  for (uint32_t s = 0; s < kSubs; ++s) {
    uint8_t level[kSub];
    get_strip(4, panel + kPanelStrips + strip_bytes(4) * s, lane, level);
    put_nibbles(level, block + kQuants + 16 * s);
  }
}

}  // namespace xs
}  // namespace

const Codec kCodecIq4Nl = {{"iq4_nl", kSub, nl::kBytes, false},
                           nl::encode,
                           decode_from_levels<nl::levels, kSub>,
                           nl::levels,
                           nl::pack,
                           nl::unpack};
const Codec kCodecIq4Xs = {{"iq4_xs", xs::kValues, xs::kBytes, false},
                           xs::encode,
                           decode_from_levels<xs::levels, xs::kValues>,
                           xs::levels,
                           xs::pack,
                           xs::unpack};

}  // namespace smoe
