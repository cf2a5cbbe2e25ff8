// Q3_K: 256 values in 110 bytes, sixteen sub-blocks of 16 with a 6-bit scale each.
//
// Block: 32 bytes of upper bits (bit i of byte k is that of q[32i + k]), 64 bytes of the lower two bits (quarters.h),
// 12 bytes of scales, f16 d. Scale j: the low 4 bits are the low (j < 8) or high nibble of byte j % 8, the upper two
// bits 2 * (j / 4) of byte 8 + j % 4. value = d * (scale - 32) * (q - 4). Panel block (1760 bytes):
//      0  16 x f16 d, one per row
//     32  8 x 16 bytes, one per row: low 4 bits of scales 2i and 2i + 1, the latter above
//    160  4 x 16 bytes: upper two bits of scales 4i to 4i + 3, lowest first
//    224  8 strips (strip.h) of 3 bits, two sub-blocks each
#include <algorithm>
#include <cmath>

#include "quant/codec.h"
#include "quant/fit.h"
#include "quant/quarters.h"
#include "quant/strip.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 256, kBytes = 110, kSub = 16, kSubs = 16;
constexpr uint32_t kQuants = 32, kScales = 96, kD = 108;  // offsets in a block
constexpr uint32_t kPanelLow = 32, kPanelHigh = 160, kPanelStrips = 224;

void put_scales(const uint8_t* scale, uint8_t* bytes) {  // sixteen of 0..63
  std::fill(bytes, bytes + 12, static_cast<uint8_t>(0));
  for (uint32_t j = 0; j < kSubs; ++j) {
    bytes[j % 8] = static_cast<uint8_t>(bytes[j % 8] | (scale[j] & 15) << 4 * (j / 8));
    bytes[8 + j % 4] = static_cast<uint8_t>(bytes[8 + j % 4] | (scale[j] >> 4) << 2 * (j / 4));
  }
}

void get_scales(const uint8_t* bytes, uint8_t* scale) {
  for (uint32_t j = 0; j < kSubs; ++j) {
    scale[j] = static_cast<uint8_t>((bytes[j % 8] >> 4 * (j / 8) & 15) | (bytes[8 + j % 4] >> 2 * (j / 4) & 3) << 4);
  }
}

void put_levels(const uint8_t* level, uint8_t* block) {
  put_quarters(level, block + kQuants);
  for (uint32_t k = 0; k < 32; ++k) {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(level[32 * i + k] >> 2) << i;
    block[k] = static_cast<uint8_t>(bits);
  }
}

void get_levels(const uint8_t* block, uint8_t* level) {
  get_quarters(block + kQuants, level);
  for (uint32_t k = 0; k < kValues; ++k) level[k] = static_cast<uint8_t>(level[k] | (block[k % 32] >> k / 32 & 1) << 2);
}

// The scales of the sub-blocks as levels 0..63 and d, which gives them as d * (level - 32).
float scales_by_largest(const float* scale, uint8_t* level) {
  float extreme = 0;
  for (uint32_t s = 0; s < kSubs; ++s) {
    if (std::fabs(scale[s]) > std::fabs(extreme)) extreme = scale[s];
  }
  if (extreme == 0) {
    std::fill(level, level + kSubs, static_cast<uint8_t>(0));
    return 0;
  }
  const float inverse = -32.0f / extreme;
  for (uint32_t s = 0; s < kSubs; ++s) {
    // As in the reference: the integer goes through 8 bits before it is clamped.
    const auto rounded = static_cast<int8_t>(round_even(inverse * scale[s]));
    level[s] = static_cast<uint8_t>(std::clamp<int32_t>(rounded, -32, 31) + 32);
  }
  return 1.0f / inverse;
}

float scales_by_search(const float* scale, const float* sums, uint8_t* level) {
  float x[8 * kSubs] = {}, w[8 * kSubs] = {};
  std::copy(scale, scale + kSubs, x);
  std::copy(sums, sums + kSubs, w);
  SignedFit fit;
  fit_signed({kSubs, x, w}, 32, &fit);
  for (uint32_t s = 0; s < kSubs; ++s) level[s] = static_cast<uint8_t>(fit.level[s] + 32);
  return fit.scale[0];
}

void encode(const float* x, const BlockFit& known, uint8_t* block) {
  float w[kValues], sums[kSubs] = {}, sum = 0;
  for (uint32_t k = 0; k < kValues; ++k) {
    w[k] = x[k] * x[k];
    sum += w[k];
  }
  const bool weighted = known.importance != nullptr;
  if (weighted) importance_weights(x, known.importance, 2 * sum / kValues, kValues, w);
  for (uint32_t k = 0; k < kValues; ++k) sums[k / kSub] += w[k];
  uint8_t level[kValues], stored[kSubs];
  SignedFit fit;
  const FitInput in = {kSub, x, w, kSubs};
  weighted ? fit_signed(in, 4, &fit) : fit_stepwise(in, 4, &fit);
  const float d = weighted ? scales_by_search(fit.scale, sums, stored) : scales_by_largest(fit.scale, stored);
  put_scales(stored, block + kScales);
  store_u16(block + kD, f32_to_f16(d));
  for (uint32_t s = 0; s < kSubs; ++s) {
    const float step = f16_to_f32(load_u16(block + kD)) * static_cast<float>(stored[s] - 32);
    if (step == 0) continue;  // the search's levels stay
    fitter().round(x + kSub * s, kSub, 0, step, -4, 3, fit.level + kSub * s);
  }
  for (uint32_t k = 0; k < kValues; ++k) level[k] = static_cast<uint8_t>(fit.level[k] + 4);
  put_levels(level, block);
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block + kD));
  out->sub = kSub;
  uint8_t level[kValues], scale[kSubs];
  get_scales(block + kScales, scale);
  get_levels(block, level);
  for (uint32_t s = 0; s < kSubs; ++s) out->scale[s] = static_cast<int16_t>(scale[s] - 32);
  for (uint32_t k = 0; k < kValues; ++k) out->q[k] = static_cast<int16_t>(level[k] - 4);
}

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block + kD));
  uint8_t level[kValues], scale[kSubs];
  get_scales(block + kScales, scale);
  for (uint32_t s = 0; s < kSubs; ++s) {
    uint8_t& low = panel[kPanelLow + 16 * (s / 2) + lane];
    uint8_t& high = panel[kPanelHigh + 16 * (s / 4) + lane];
    low = static_cast<uint8_t>(low | (scale[s] & 15) << 4 * (s % 2));
    high = static_cast<uint8_t>(high | (scale[s] >> 4) << 2 * (s % 4));
  }
  get_levels(block, level);
  for (uint32_t i = 0; i < 8; ++i)
    put_strip(3, level + kStripCols * i, lane, panel + kPanelStrips + strip_bytes(3) * i);
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block + kD, load_u16(panel + 2 * lane));
  uint8_t level[kValues], scale[kSubs];
  for (uint32_t s = 0; s < kSubs; ++s) {
    const uint32_t low = panel[kPanelLow + 16 * (s / 2) + lane] >> 4 * (s % 2) & 15;
    const uint32_t high = panel[kPanelHigh + 16 * (s / 4) + lane] >> 2 * (s % 4) & 3;
    scale[s] = static_cast<uint8_t>(low | high << 4);
  }
  put_scales(scale, block + kScales);
  for (uint32_t i = 0; i < 8; ++i)
    get_strip(3, panel + kPanelStrips + strip_bytes(3) * i, lane, level + kStripCols * i);
  put_levels(level, block);
}

}  // namespace

const Codec kCodecQ3_K = {
    {"q3_k", kValues, kBytes, false}, encode, decode_from_levels<levels, kValues>, levels, pack, unpack};

}  // namespace smoe
