// Q8_0: 32 values in 34 bytes.
//
// Block: f16 d, then 32 x i8 q. value = d * q.
// Panel block (544 bytes): 16 x f16 d, one per row; then 8 groups of 64 bytes. Byte 4 * row + i of group g is q[4g + i]
// of that row plus 128: unsigned, as the u8 x i8 dot-product instructions want it, four consecutive columns to a 32-bit
// lane and one lane per row. A kernel takes 128 * sum(activations) off again.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "quant/codec.h"
#include "quant/fit.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 32, kBytes = 34;

void encode(const float* x, const BlockFit&, uint8_t* block) {
  const float amax = std::bit_cast<float>(fitter().largest(x, kValues));
  const float d = amax / 127.0f;
  const float inverse = d == 0 ? 0.0f : 1.0f / d;
  store_u16(block, f32_to_f16(d));
  if (std::isfinite(inverse)) return fitter().round_away(x, kValues, inverse, reinterpret_cast<int8_t*>(block + 2));
  std::fill(block + 2, block + kBytes, static_cast<uint8_t>(0));  // d below 2^-128, stored as 0, as in the reference
}

void decode(const uint8_t* block, float* x) {
  const float d = f16_to_f32(load_u16(block));
  for (uint32_t k = 0; k < kValues; ++k) x[k] = d * static_cast<float>(static_cast<int8_t>(block[2 + k]));
}

void levels(const uint8_t* block, Levels* out) {
  out->d = f16_to_f32(load_u16(block));
  out->dmin = 0;
  out->sub = kValues;
  out->has_min = false;
  out->scale[0] = 1;
  for (uint32_t k = 0; k < kValues; ++k) out->q[k] = static_cast<int8_t>(block[2 + k]);
}

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block));
  for (uint32_t g = 0; g < kValues / 4; ++g) {
    uint32_t four;
    std::memcpy(&four, block + 2 + 4 * g, sizeof(four));
    four ^= 0x80808080;
    std::memcpy(panel + 32 + 64 * g + 4 * lane, &four, sizeof(four));
  }
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block, load_u16(panel + 2 * lane));
  for (uint32_t g = 0; g < kValues / 4; ++g) {
    uint32_t four;
    std::memcpy(&four, panel + 32 + 64 * g + 4 * lane, sizeof(four));
    four ^= 0x80808080;
    std::memcpy(block + 2 + 4 * g, &four, sizeof(four));
  }
}

}  // namespace

const Codec kCodecQ8_0 = {{"q8_0", kValues, kBytes, false}, encode, decode, levels, pack, unpack};

}  // namespace smoe
