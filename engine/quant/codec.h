// What one encoding file gives to the dispatcher in quant.cpp, and its integers to the scalar kernels. Private to
// engine/quant and engine/kernels.
#pragma once

#include <bit>
#include <cstdint>

#include "quant/quant.h"

namespace smoe {

inline constexpr uint32_t kMaxBlockValues = 256;
inline constexpr uint32_t kMaxBlockBytes = 210;
inline constexpr uint32_t kMostTogether = 8;

// The integers of one block: value[k] = d * scale[k / sub] * q[k] - dmin * min[k / sub], k < block_values.
// Encodings without sub-blocks have sub = block_values and scale[0] = 1; those without minimums have dmin = 0.
struct Levels {
  float d = 0, dmin = 0;
  uint32_t sub = 0;
  bool has_min = false;
  int16_t scale[16] = {1};
  int16_t min[16] = {1};
  int16_t q[kMaxBlockValues];
};

// What an encoder may know beside the block's values: the importance of its columns (null = none), the mean square of
// the whole row, and MLX's rule.
struct BlockFit {
  const float* importance = nullptr;
  float mean_square = 0;
  MlxRule rule = MlxRule::gpu;
};

// One block-quantised encoding. "block" is the ecosystem's own block; "panel block" is sixteen of them, one per row, in
// 16 * block_bytes bytes, arranged as the file describes.
struct Codec {
  EncodingInfo info;
  void (*encode_block)(const float* x, const BlockFit& fit, uint8_t* block);
  void (*decode_block)(const uint8_t* block, float* x);
  void (*levels)(const uint8_t* block, Levels* out);
  void (*pack_block)(const uint8_t* block, uint32_t lane, uint8_t* panel_block);    // into a zeroed panel block
  void (*unpack_block)(const uint8_t* panel_block, uint32_t lane, uint8_t* block);  // the inverse
  // Up to kMostTogether neighbours at once, where that is faster; null elsewhere. The importance is that of all.
  void (*encode_together)(const float* x, uint32_t count, const BlockFit& fit, uint8_t* blocks) = nullptr;
};

const Codec& codec(Encoding e);  // quantised encodings only

extern const Codec kCodecQ8_0, kCodecQ4_0, kCodecQ4_1, kCodecQ5_0, kCodecQ5_1, kCodecMxfp4, kCodecIq4Nl;
extern const Codec kCodecQ2_K, kCodecQ3_K, kCodecQ4_K, kCodecQ5_K, kCodecQ6_K, kCodecIq4Xs;
const Codec& mlx_codec(Encoding e);

// decode_block of an encoding whose values are those that its levels give.
template <void (*LevelsOf)(const uint8_t*, Levels*), uint32_t N>
void decode_from_levels(const uint8_t* block, float* x) {
  Levels levels;
  LevelsOf(block, &levels);
  for (uint32_t first = 0, s = 0; first < N; first += levels.sub, ++s) {
    const float scale = levels.d * static_cast<float>(levels.scale[s]);
    const float min = levels.dmin * static_cast<float>(levels.min[s]);
    for (uint32_t k = first; k < first + levels.sub; ++k) {
      const float value = scale * static_cast<float>(levels.q[k]);
      x[k] = levels.has_min ? value - min : value;
    }
  }
}

// Weights of n values where importance weights are given: importance * sqrt(mean_square + x^2).
void importance_weights(const float* x, const float* importance, float mean_square, uint32_t n, float* w);

// Round half to even for |x| < 2^22 by adding and subtracting 1.5 * 2^23; outside (a quotient by a denormal) the bits
// that this gives, -2^22 for an infinity and 0 for a NaN, are part of the byte identity with the ecosystem's
// quantisers.
inline int32_t round_even(float x) {
  const float shifted = x + 12582912.0f;
  return static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) & 0x7fffff) - 0x400000;
}

// Truncation as the reference's conversion to an 8-bit integer: 0 where x is not finite.
uint8_t truncate_level(float x, int32_t most);

// The scale of MXFP4: 2^(e - 128), also where that is subnormal.
float power_of_two(uint8_t e);

inline uint16_t load_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | (p[1] << 8)); }
inline void store_u16(uint8_t* p, uint16_t v) {
  p[0] = static_cast<uint8_t>(v);
  p[1] = static_cast<uint8_t>(v >> 8);
}

// 32 levels in halves: byte j is q[j] & 15 | (q[j + 16] & 15) << 4.
void put_nibbles(const uint8_t* level, uint8_t* bytes);
void get_nibbles(const uint8_t* bytes, uint8_t* level);

}  // namespace smoe
