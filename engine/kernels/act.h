// The byte arrangement of int8 activations, private to engine/kernels. One per format, the same for every ISA: bytes
// made by one ISA's quantize_act are valid for another's matmul_q8, and are the same bytes.
//
// d = amax / 127; q = round-half-even(x / d), clamped to +-127 (a subnormal d may be rounded far down); all 0 where d =
// 0. Where a value is not finite d is NaN and every q is 0, so that the outputs are NaN and the engine's check sees
// them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace smoe {

// Weights are stored unsigned (q + offset); `start` is what a dot product of unsigned weights starts from, -offset *
// sum.
struct Act32 {
  int8_t q[32];
  float d;
  int32_t start128;  // -128 * sum, for Q8_0 and IQ4_NL
  int32_t start8;    // -8 * sum, for Q4_0
  int32_t start16;   // -16 * sum, for Q5_0 and MXFP4
};
static_assert(sizeof(Act32) == 48);

struct Act256 {
  int8_t q[256];
  int32_t start32[16];  // -32 * sum of each 16, for Q6_K
  int16_t sum16[16];    // sum of each 16
  int16_t sum32[8];     // sum of each 32
  float d;
  int32_t zero[3];
};
static_assert(sizeof(Act256) == 384);

inline constexpr uint32_t kNotFinite = 0x7f800000;  // magnitudes at or above: infinity, NaN
inline constexpr uint32_t kQuietNan = 0x7fc00000;

// What a tile function of an ISA works on, P panels times T tokens: the first panel's bytes, bytes from panel to panel,
// blocks in a row, the tokens' activations; out[(p * T + t) * 16 + lane]. Ahead: the weights come from memory and are
// prefetched.
struct Tile {
  const uint8_t* w;
  size_t panel, blocks;
  const uint8_t* const* acts;
  float* out;
  Encoding encoding;
  bool ahead;
};

template <class Act, int T>
inline void act_pointers(const Tile& job, const Act* (&act)[T]) {
  for (int t = 0; t < T; ++t) act[t] = reinterpret_cast<const Act*>(job.acts[t]);
}

// Row t's activations.
inline const uint8_t* act_row(const uint8_t* acts, const uint32_t* index, size_t t, size_t stride) {
  return acts + (index ? index[t] : t) * stride;
}

}  // namespace smoe
