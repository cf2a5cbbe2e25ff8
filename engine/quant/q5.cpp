// Q4_1, Q5_0 and Q5_1: 32 values in 20, 22 and 24 bytes.
//
// Block: f16 d, for the _1 f16 m; for the Q5 four bytes with the upper bit of q[k] at bit k; then 16 bytes, byte j is
// q[j] & 15 | (q[j + 16] & 15) << 4. value = d * q + m, Q5_0: d * (q - 16).
// Panel block (320, 352, 384 bytes): 16 x f16 d, one per row; for the _1 16 x f16 m; a strip (strip.h) of 4 or 5 bits.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/codec.h"
#include "quant/fit.h"
#include "quant/strip.h"

namespace smoe {
namespace {

constexpr uint32_t kValues = 32;

template <uint32_t Bits, bool HasMin>
struct Blocks {
  static constexpr uint32_t kMost = (1u << Bits) - 1, kScales = HasMin ? 4 : 2, kHigh = Bits == 5 ? 4 : 0;
  static constexpr uint32_t kBytes = kScales + kHigh + 16;

  static void put_levels(const uint8_t* level, uint8_t* block) {
    put_nibbles(level, block + kScales + kHigh);
    if (Bits == 4) return;
    uint32_t high = 0;
    for (uint32_t k = 0; k < kValues; ++k) high |= static_cast<uint32_t>(level[k] >> 4) << k;
    for (uint32_t i = 0; i < 4; ++i) block[kScales + i] = static_cast<uint8_t>(high >> 8 * i);
  }

  static void get_levels(const uint8_t* block, uint8_t* level) {
    get_nibbles(block + kScales + kHigh, level);
    if (Bits == 4) return;
    for (uint32_t k = 0; k < kValues; ++k) {
      level[k] = static_cast<uint8_t>(level[k] | (block[kScales + k / 8] >> k % 8 & 1) << 4);
    }
  }

  // From the smallest value to the largest.
  static void encode_range(const float* x, uint8_t* block, uint8_t* level) {
    const auto [low, high] = std::minmax_element(x, x + kValues);
    const float d = (*high - *low) / static_cast<float>(kMost);
    const float inverse = d == 0 ? 0.0f : 1.0f / d;
    store_u16(block, f32_to_f16(d));
    store_u16(block + 2, f32_to_f16(*low));
    for (uint32_t k = 0; k < kValues; ++k) level[k] = truncate_level((x[k] - *low) * inverse + 0.5f, kMost);
  }

  // The value of largest magnitude becomes level 0.
  static void encode_signed(const float* x, uint8_t* block, uint8_t* level) {
    float amax = 0, extreme = 0;
    for (uint32_t k = 0; k < kValues; ++k) {
      if (std::fabs(x[k]) > amax) {
        amax = std::fabs(x[k]);
        extreme = x[k];
      }
    }
    const float d = extreme / -16.0f;
    const float inverse = d == 0 ? 0.0f : 1.0f / d;
    store_u16(block, f32_to_f16(d));
    for (uint32_t k = 0; k < kValues; ++k) level[k] = truncate_level(x[k] * inverse + 16.5f, kMost);
  }

  static void encode(const float* x, const BlockFit& fit, uint8_t* block) {
    uint8_t level[kValues];
    if (fit.importance != nullptr) {
      encode_weighted(x, fit, block, level);
    } else if (HasMin) {
      encode_range(x, block, level);
    } else {
      encode_signed(x, block, level);
    }
    put_levels(level, block);
  }

  // One of the search's eight lanes is used.
  static void encode_weighted(const float* x, const BlockFit& fit, uint8_t* block, uint8_t* level) {
    float values[8 * kValues] = {}, w[8 * kValues] = {};
    std::copy(x, x + kValues, values);
    importance_weights(x, fit.importance, fit.mean_square, kValues, w);
    if (HasMin) {
      AffineFit found;
      fit_affine({kValues, values, w}, {kMost, -0.9f, 0.05f, 36, false, true}, &found);
      store_u16(block, f32_to_f16(found.scale[0]));
      store_u16(block + 2, f32_to_f16(-found.min[0]));
      std::copy(found.level, found.level + kValues, level);
    } else {
      SignedFit found;
      fit_signed({kValues, values, w}, 16, &found);
      store_u16(block, f32_to_f16(found.scale[0]));
      for (uint32_t k = 0; k < kValues; ++k) level[k] = static_cast<uint8_t>(found.level[k] + 16);
    }
  }

  static void levels(const uint8_t* block, Levels* out) {
    out->d = f16_to_f32(load_u16(block));
    out->dmin = HasMin ? -f16_to_f32(load_u16(block + 2)) : 0.0f;
    out->sub = kValues;
    out->has_min = HasMin;
    uint8_t level[kValues];
    get_levels(block, level);
    for (uint32_t k = 0; k < kValues; ++k) out->q[k] = static_cast<int16_t>(level[k] - (HasMin ? 0 : 16));
  }

  static void pack(const uint8_t* block, uint32_t lane, uint8_t* panel) {
    for (uint32_t i = 0; i < kScales; i += 2) store_u16(panel + 16 * i + 2 * lane, load_u16(block + i));
    uint8_t level[kValues];
    get_levels(block, level);
    put_strip(Bits, level, lane, panel + 16 * kScales);
  }

  static void unpack(const uint8_t* panel, uint32_t lane, uint8_t* block) {
    for (uint32_t i = 0; i < kScales; i += 2) store_u16(block + i, load_u16(panel + 16 * i + 2 * lane));
    uint8_t level[kValues];
    get_strip(Bits, panel + 16 * kScales, lane, level);
    put_levels(level, block);
  }

  static constexpr Codec codec(const char* name) {
    return {{name, kValues, kBytes, false}, encode, decode_from_levels<levels, kValues>, levels, pack, unpack};
  }
};

}  // namespace

const Codec kCodecQ4_1 = Blocks<4, true>::codec("q4_1");
const Codec kCodecQ5_0 = Blocks<5, false>::codec("q5_0");
const Codec kCodecQ5_1 = Blocks<5, true>::codec("q5_1");

}  // namespace smoe
