// Q6_K: 256 values in 210 bytes, sixteen sub-blocks of 16 with a signed 8-bit scale each.
//
// Block: 128 bytes ql (low 4 bits), 64 bytes qh (high 2 bits), 16 x i8 scales, f16 d. Per half of 128 values, i < 32:
// ql[i] = q[i] & 15 | (q[i + 64] & 15) << 4, ql[i + 32] likewise from q[i + 32] and q[i + 96], and qh[i] holds the
// upper bits of q[i], q[i + 32], q[i + 64], q[i + 96], lowest first. value = d * scale * (q - 32), q in 0..63.
//
// Panel block (3360 bytes):
//      0  16 x f16 d, one per row
//     32  16 sub-blocks x 16 x i8 scale, one per row
//    288  16 sub-blocks x 3 x 64 bytes: A, B, H
// Sub-block s has four groups of four columns, 16s + 4g + i. Byte 4 * row + i of A holds the low 4 bits of group 0 and,
// in the high nibble, of group 2; B those of groups 1 and 3; H the upper 2 bits of groups 0 to 3, lowest first. So
// three registers hold one sub-block of sixteen rows.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/codec.h"
#include "quant/fit.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 256, kBytes = 210, kSub = 16, kSubs = 16;
constexpr uint32_t kHigh = 128, kScales = 192, kD = 208;  // offsets in a block
constexpr float kTiny = 1e-15f;                           // below this a scale counts as zero

// level: 256 of -32..31
void store_levels(const int8_t* level, uint8_t* block) {
  const auto q = [&](uint32_t k) { return static_cast<uint32_t>(level[k] + 32); };
  for (uint32_t half = 0; half < 2; ++half) {
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t k = 128 * half + i;
      const uint32_t a = q(k), b = q(k + 32), c = q(k + 64), d = q(k + 96);
      block[64 * half + i] = static_cast<uint8_t>((a & 15) | (c & 15) << 4);
      block[64 * half + i + 32] = static_cast<uint8_t>((b & 15) | (d & 15) << 4);
      block[kHigh + 32 * half + i] = static_cast<uint8_t>(a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6);
    }
  }
}

void encode(const float* x, const BlockFit& known, uint8_t* block) {
  SignedFit fit;
  float w[kValues];
  for (uint32_t k = 0; k < kValues; ++k) w[k] = known.importance != nullptr ? known.importance[k] : x[k] * x[k];
  FitInput in = {kSub, x, w, kSubs, false};
  fitter().with_signs(in, 32, &fit);
  float extreme = 0;
  for (uint32_t s = 0; s < kSubs; ++s) {
    if (std::fabs(fit.scale[s]) > std::fabs(extreme)) extreme = fit.scale[s];
  }
  if (std::fabs(extreme) < kTiny) {
    std::fill(block, block + kBytes, static_cast<uint8_t>(0));
    return;
  }
  const float inverse = -128.0f / extreme;
  store_u16(block + kD, f32_to_f16(1.0f / inverse));
  const float d = f16_to_f32(load_u16(block + kD));
  float step[kSubs];
  for (uint32_t s = 0; s < kSubs; ++s) {
    const int8_t scale = static_cast<int8_t>(std::min(127, round_even(inverse * fit.scale[s])));
    block[kScales + s] = static_cast<uint8_t>(scale);
    step[s] = d * static_cast<float>(scale);
    in.levels |= step[s] == 0;
  }
  if (in.levels) fitter().with_signs(in, 32, &fit);
  for (uint32_t s = 0; s < kSubs; ++s) {  // for the scale as stored; where that is 0 the search's levels stay
    if (step[s] != 0) fitter().round(x + kSub * s, kSub, 0, step[s], -32, 31, fit.level + kSub * s);
  }
  store_levels(fit.level, block);
}

// level: 256 of 0..63
void get_levels(const uint8_t* block, uint8_t* level) {
  for (uint32_t half = 0; half < 2; ++half) {
    const uint8_t *low = block + 64 * half, *high = block + kHigh + 32 * half;
    uint8_t* q = level + 128 * half;
    for (uint32_t i = 0; i < 32; ++i) {
      q[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
      q[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      q[i + 64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      q[i + 96] = static_cast<uint8_t>(low[i + 32] >> 4 | (high[i] >> 6) << 4);
    }
  }
}

void decode(const uint8_t* block, float* x) {
  const float d = f16_to_f32(load_u16(block + kD));
  uint8_t level[kValues];
  get_levels(block, level);
  for (uint32_t s = 0; s < kSubs; ++s) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(block[kScales + s]));
    for (uint32_t k = kSub * s; k < kSub * (s + 1); ++k) x[k] = scale * static_cast<float>(level[k] - 32);
  }
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block + kD));
  out->dmin = 0;
  out->sub = kSub;
  out->has_min = false;
  for (uint32_t s = 0; s < kSubs; ++s) out->scale[s] = static_cast<int8_t>(block[kScales + s]);
  uint8_t level[kValues];
  get_levels(block, level);
  for (uint32_t k = 0; k < kValues; ++k) out->q[k] = static_cast<int16_t>(level[k] - 32);
}

// The four neighbouring bytes of a row in one plane of a sub-block.
uint32_t at(uint32_t lane, uint32_t s, uint32_t plane) { return 288 + (3 * s + plane) * 64 + 4 * lane; }

uint32_t load_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

void store_u32(uint8_t* p, uint32_t v) { std::memcpy(p, &v, sizeof(v)); }

constexpr uint32_t kFours = 0x0f0f0f0f, kTwos = 0x03030303;  // of each of four bytes

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block + kD));
  uint8_t level[kValues];
  get_levels(block, level);
  for (uint32_t s = 0; s < kSubs; ++s) {
    panel[32 + 16 * s + lane] = block[kScales + s];
    uint32_t q[4], high = 0;
    for (uint32_t g = 0; g < 4; ++g) {
      q[g] = load_u32(level + kSub * s + 4 * g);
      high |= (q[g] >> 4 & kTwos) << 2 * g;
    }
    store_u32(panel + at(lane, s, 0), (q[0] & kFours) | (q[2] & kFours) << 4);
    store_u32(panel + at(lane, s, 1), (q[1] & kFours) | (q[3] & kFours) << 4);
    store_u32(panel + at(lane, s, 2), high);
  }
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  int8_t level[kValues];
  store_u16(block + kD, load_u16(panel + 2 * lane));
  for (uint32_t s = 0; s < kSubs; ++s) {
    block[kScales + s] = panel[32 + 16 * s + lane];
    for (uint32_t k = 0; k < kSub; ++k) {
      const uint32_t group = k / 4, i = k % 4;
      const uint32_t low = panel[at(lane, s, group % 2) + i] >> 4 * (group / 2) & 15;
      const uint32_t high = panel[at(lane, s, 2) + i] >> 2 * group & 3;
      level[kSub * s + k] = static_cast<int8_t>(static_cast<int32_t>(low | high << 4) - 32);
    }
  }
  store_levels(level, block);
}

}  // namespace

const Codec kCodecQ6_K = {{"q6_k", kValues, kBytes, false}, encode, decode, levels, pack, unpack};

}  // namespace smoe
