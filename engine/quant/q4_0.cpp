// Q4_0: 32 values in 18 bytes.
//
// Block: f16 d, then 16 bytes; byte j is q[j] | q[j + 16] << 4, q in 0..15. value = d * (q - 8).
// Panel block (288 bytes): 16 x f16 d, one per row; then 4 groups of 64 bytes. Byte 4 * row + i of group g is byte 4g +
// i of that row's block: the low nibbles are columns 4g.., the high nibbles columns 16 + 4g.. A kernel takes 8 *
// sum(activations) off for the offset.
#include <algorithm>
#include <cmath>

#include "quant/codec.h"
#include "quant/fit.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 32, kBytes = 18;

uint32_t level(float x) {
  // Where 1/d overflows (|d| below 2^-128, stored as 0) every level is 0, as in the reference.
  if (!std::isfinite(x)) return 0;
  return static_cast<uint32_t>(std::clamp(static_cast<int32_t>(x + 8.5f), 0, 15));
}

// One of the search's eight lanes is used.
void encode_weighted(const float* x, const BlockFit& fit, uint8_t* block) {
  float values[8 * kValues] = {}, w[8 * kValues] = {};
  std::copy(x, x + kValues, values);
  importance_weights(x, fit.importance, fit.mean_square, kValues, w);
  SignedFit found;
  fit_signed({kValues, values, w}, 8, &found);
  store_u16(block, f32_to_f16(found.scale[0]));
  uint8_t level[kValues];
  for (uint32_t k = 0; k < kValues; ++k) level[k] = static_cast<uint8_t>(found.level[k] + 8);
  put_nibbles(level, block + 2);
}

void encode(const float* x, const BlockFit& fit, uint8_t* block) {
  if (fit.importance != nullptr) return encode_weighted(x, fit, block);
  float amax = 0, extreme = 0;  // extreme: the first value of largest magnitude, with its sign; it becomes level 0
  for (uint32_t k = 0; k < kValues; ++k) {
    if (std::fabs(x[k]) > amax) {
      amax = std::fabs(x[k]);
      extreme = x[k];
    }
  }
  const float d = extreme / -8.0f;
  const float inverse = d == 0 ? 0.0f : 1.0f / d;
  store_u16(block, f32_to_f16(d));
  for (uint32_t j = 0; j < 16; ++j) {
    block[2 + j] = static_cast<uint8_t>(level(x[j] * inverse) | level(x[j + 16] * inverse) << 4);
  }
}

int32_t quant(const uint8_t* block, uint32_t k) {
  return static_cast<int32_t>(k < 16 ? block[2 + k] & 15 : block[2 + k - 16] >> 4) - 8;
}

void decode(const uint8_t* block, float* x) {
  const float d = f16_to_f32(load_u16(block));
  for (uint32_t k = 0; k < kValues; ++k) x[k] = d * static_cast<float>(quant(block, k));
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block));
  out->dmin = 0;
  out->sub = kValues;
  out->has_min = false;
  out->scale[0] = 1;
  for (uint32_t k = 0; k < kValues; ++k) out->q[k] = static_cast<int16_t>(quant(block, k));
}

uint32_t at(uint32_t lane, uint32_t j) { return 32 + (j / 4) * 64 + lane * 4 + j % 4; }

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block));
  for (uint32_t j = 0; j < 16; ++j) panel[at(lane, j)] = block[2 + j];
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block, load_u16(panel + 2 * lane));
  for (uint32_t j = 0; j < 16; ++j) block[2 + j] = panel[at(lane, j)];
}

}  // namespace

const Codec kCodecQ4_0 = {{"q4_0", kValues, kBytes, false}, encode, decode, levels, pack, unpack};

}  // namespace smoe
