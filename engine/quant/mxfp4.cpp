// MXFP4: 32 values in 17 bytes, as in the OCP microscaling formats.
//
// Block: a byte e, then 16 bytes, byte j is q[j] | q[j + 16] << 4. value = 2^(e - 128) * kTwice[q], kTwice being twice
// the value of a four-bit float (sign, two bits of exponent, one of mantissa). Panel block (272 bytes): 16 x e, one per
// row; a strip (strip.h) of 4 bits.
#include <bit>
#include <cmath>

#include "quant/codec.h"
#include "quant/strip.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 32, kBytes = 17;
constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

uint8_t nearest(float x, float d) {
  uint8_t best = 0;
  float least = std::fabs(kTwice[0] * d - x);
  for (uint8_t i = 1; i < 16; ++i) {
    const float error = std::fabs(kTwice[i] * d - x);
    if (error < least) {
      least = error;
      best = i;
    }
  }
  return best;
}

void encode(const float* x, const BlockFit&, uint8_t* block) {
  float amax = 0;
  for (uint32_t k = 0; k < kValues; ++k) amax = std::fmax(amax, std::fabs(x[k]));
  // The largest value's exponent less two: 4 to 6 times the power of two is what the largest level covers.
  block[0] = amax > 0 ? static_cast<uint8_t>(static_cast<int32_t>(std::floor(std::log2(amax)) - 2 + 127)) : 0;
  const float d = power_of_two(block[0]);
  uint8_t level[kValues];
  for (uint32_t k = 0; k < kValues; ++k) level[k] = nearest(x[k], d);
  put_nibbles(level, block + 1);
}

void levels(const uint8_t* block, Levels* out) {
  out->d = power_of_two(block[0]);
  out->sub = kValues;
  uint8_t level[kValues];
  get_nibbles(block + 1, level);
  for (uint32_t k = 0; k < kValues; ++k) out->q[k] = kTwice[level[k]];
}

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  panel[lane] = block[0];
  uint8_t level[kValues];
  get_nibbles(block + 1, level);
  put_strip(4, level, lane, panel + 16);
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  block[0] = panel[lane];
  uint8_t level[kValues];
  get_strip(4, panel + 16, lane, level);
  put_nibbles(level, block + 1);
}

}  // namespace

float power_of_two(uint8_t e) {
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

const Codec kCodecMxfp4 = {
    {"mxfp4", kValues, kBytes, false}, encode, decode_from_levels<levels, kValues>, levels, pack, unpack};

}  // namespace smoe
