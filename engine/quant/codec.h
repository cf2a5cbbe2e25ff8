// What one encoding file gives to the dispatcher in quant.cpp, and its integers to the scalar kernels. Private to
// engine/quant and engine/kernels.
#pragma once

#include <cstdint>

#include "quant/quant.h"

namespace smoe {

inline constexpr uint32_t kMaxBlockValues = 256;
inline constexpr uint32_t kMaxBlockBytes = 210;

// The integers of one block: value[k] = d * scale[k / sub] * q[k] - dmin * min[k / sub], k < block_values.
// Encodings without sub-blocks have sub = block_values and scale[0] = 1; those without minimums have dmin = 0.
struct Levels {
  float d = 0, dmin = 0;
  uint32_t sub = 0;
  bool has_min = false;
  int16_t scale[16] = {};
  int16_t min[16] = {};
  int8_t q[kMaxBlockValues] = {};
};

// One block-quantised encoding. "block" is the ecosystem's own block; "panel block" is sixteen of them, one per row, in
// 16 * block_bytes bytes, arranged as the file describes.
struct Codec {
  EncodingInfo info;
  void (*encode_block)(const float* x, uint8_t* block);
  void (*decode_block)(const uint8_t* block, float* x);
  void (*levels)(const uint8_t* block, Levels* out);
  void (*pack_block)(const uint8_t* block, uint32_t lane, uint8_t* panel_block);    // into a zeroed panel block
  void (*unpack_block)(const uint8_t* panel_block, uint32_t lane, uint8_t* block);  // the inverse
};

const Codec& codec(Encoding e);  // quantised encodings only

extern const Codec kCodecQ8_0, kCodecQ4_0, kCodecQ4_K, kCodecQ6_K;

// Round half to even for |x| < 2^22 by adding and subtracting 1.5 * 2^23; outside (a quotient by a denormal) the bits
// that this gives, -2^22 for an infinity and 0 for a NaN, are part of the byte identity with the ecosystem's
// quantisers.
int32_t round_even(float x);

uint16_t load_u16(const uint8_t* p);
void store_u16(uint8_t* p, uint16_t v);

}  // namespace smoe
