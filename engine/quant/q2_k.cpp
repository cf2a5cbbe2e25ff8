// Q2_K: 256 values in 84 bytes, sixteen sub-blocks of 16 with a 4-bit scale and a 4-bit minimum each.
//
// Block: 16 bytes, scale | minimum << 4; 64 bytes of quants; f16 d, f16 dmin. Byte i of the quants of each half of 128
// values is q[i] | q[i + 32] << 2 | q[i + 64] << 4 | q[i + 96] << 6. value = d * scale * q - dmin * minimum.
// Panel block (1344 bytes):
//      0  16 x f16 d, one per row            32  16 x f16 dmin
//     64  16 sub-blocks x 16 bytes of scale | minimum << 4, one per row
//    320  8 strips (strip.h) of 2 bits, two sub-blocks each
#include <algorithm>
#include <cmath>

#include "quant/codec.h"
#include "quant/fit.h"
#include "quant/quarters.h"
#include "quant/strip.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 256, kBytes = 84, kSub = 16, kSubs = 16;
constexpr uint32_t kQuants = 16, kD = 80, kDmin = 82;  // offsets in a block
constexpr AffineSearch kPlain = {3, -0.5f, 0.1f, 15, true}, kWeighted = {3, -0.9f, 0.05f, 36, false, true};

float by_largest(const float* values, uint8_t* level) {
  const float most = std::max(0.0f, *std::max_element(values, values + kSubs));
  const float inverse = most > 0 ? 15.0f / most : 0.0f;
  for (uint32_t s = 0; s < kSubs; ++s) level[s] = static_cast<uint8_t>(round_even(inverse * values[s]) & 15);
  return most / 15.0f;
}

void encode(const float* x, const BlockFit& known, uint8_t* block) {
  AffineFit fit;
  float w[kValues], d, dmin;
  uint8_t scale[kSubs], min[kSubs];
  if (known.importance == nullptr) {
    for (uint32_t k = 0; k < kValues; ++k) w[k] = std::fabs(x[k]);
    fit_affine({kSub, x, w, kSubs}, kPlain, &fit);
    d = by_largest(fit.scale, scale);
    dmin = by_largest(fit.min, min);
  } else {
    float sum = 0, sums[kSubs] = {};
    for (uint32_t k = 0; k < kValues; ++k) sum += x[k] * x[k];
    importance_weights(x, known.importance, sum / kValues, kValues, w);
    for (uint32_t k = 0; k < kValues; ++k) sums[k / kSub] += w[k];
    fit_affine({kSub, x, w, kSubs}, kWeighted, &fit);
    d = fit_scales(kSubs, 15, fit.scale, sums, scale);
    dmin = fit_scales(kSubs, 15, fit.min, sums, min);
  }
  store_u16(block + kD, f32_to_f16(d));
  store_u16(block + kDmin, f32_to_f16(dmin));
  d = f16_to_f32(load_u16(block + kD));
  dmin = f16_to_f32(load_u16(block + kDmin));
  for (uint32_t s = 0; s < kSubs; ++s) {
    block[s] = static_cast<uint8_t>(scale[s] | min[s] << 4);
    const float step = d * scale[s], low = dmin * min[s];
    if (step == 0) continue;  // the search's levels stay
    fitter().round(x + kSub * s, kSub, low, step, 0, 3, reinterpret_cast<int8_t*>(fit.level + kSub * s));
  }
  put_quarters(fit.level, block + kQuants);
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block + kD));
  out->dmin = f16_to_f32(load_u16(block + kDmin));
  out->sub = kSub;
  out->has_min = true;
  for (uint32_t s = 0; s < kSubs; ++s) {
    out->scale[s] = block[s] & 15;
    out->min[s] = block[s] >> 4;
  }
  uint8_t level[kValues];
  get_quarters(block + kQuants, level);
  std::copy(level, level + kValues, out->q);
}

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block + kD));
  store_u16(panel + 32 + 2 * lane, load_u16(block + kDmin));
  for (uint32_t s = 0; s < kSubs; ++s) panel[64 + 16 * s + lane] = block[s];
  uint8_t level[kValues];
  get_quarters(block + kQuants, level);
  for (uint32_t i = 0; i < 8; ++i) put_strip(2, level + kStripCols * i, lane, panel + 320 + strip_bytes(2) * i);
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block + kD, load_u16(panel + 2 * lane));
  store_u16(block + kDmin, load_u16(panel + 32 + 2 * lane));
  for (uint32_t s = 0; s < kSubs; ++s) block[s] = panel[64 + 16 * s + lane];
  uint8_t level[kValues];
  for (uint32_t i = 0; i < 8; ++i) get_strip(2, panel + 320 + strip_bytes(2) * i, lane, level + kStripCols * i);
  put_quarters(level, block + kQuants);
}

}  // namespace

const Codec kCodecQ2_K = {
    {"q2_k", kValues, kBytes, false}, encode, decode_from_levels<levels, kValues>, levels, pack, unpack};

}  // namespace smoe
