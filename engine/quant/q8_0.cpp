// Q8_0: 32 values in 34 bytes.
//
// Block: f16 d, then 32 x i8 q. value = d * q.
// Panel block (544 bytes): 16 x f16 d, one per row; then 8 groups of 64 bytes. Byte 4 * row + i of group g is q[4g + i]
// of that row plus 128: unsigned, as the u8 x i8 dot-product instructions want it, four consecutive columns to a 32-bit
// lane and one lane per row. A kernel takes 128 * sum(activations) off again.
#include <cmath>

#include "quant/codec.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 32, kBytes = 34;

void encode(const float* x, const BlockFit&, uint8_t* block) {
  float amax = 0;
  for (uint32_t k = 0; k < kValues; ++k) amax = std::fmax(amax, std::fabs(x[k]));
  const float d = amax / 127.0f;
  const float inverse = d == 0 ? 0.0f : 1.0f / d;
  store_u16(block, f32_to_f16(d));
  for (uint32_t k = 0; k < kValues; ++k) {
    const float q = std::round(x[k] * inverse);  // half away from zero
    // Where 1/d overflows (d below 2^-128, stored as 0) every level is 0, as in the reference.
    block[2 + k] = std::isfinite(q) ? static_cast<uint8_t>(static_cast<int32_t>(q)) : 0;
  }
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

uint32_t at(uint32_t lane, uint32_t k) { return 32 + (k / 4) * 64 + lane * 4 + k % 4; }

void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
  store_u16(panel + 2 * lane, load_u16(block));
  for (uint32_t k = 0; k < kValues; ++k) panel[at(lane, k)] = block[2 + k] ^ 0x80;
}

void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
  store_u16(block, load_u16(panel + 2 * lane));
  for (uint32_t k = 0; k < kValues; ++k) block[2 + k] = panel[at(lane, k)] ^ 0x80;
}

}  // namespace

const Codec kCodecQ8_0 = {{"q8_0", kValues, kBytes, false}, encode, decode, levels, pack, unpack};

}  // namespace smoe
