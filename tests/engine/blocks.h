// The block encodings, for tests that go through all of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "quant/codec.h"
#include "quant/quant.h"

namespace smoe {

inline std::vector<Encoding> block_encodings() {
  std::vector<Encoding> found;
  for (const Encoding e : all_encodings()) {
    if (!encoding_info(e).plain) found.push_back(e);
  }
  return found;
}

// Puts the scales of one block to d, and its minimum's factor to dmin, whatever else its bytes say.
inline void put_block_scales(Encoding e, uint8_t* block, float d, float dmin) {
  switch (e) {
    case Encoding::mxfp4:
      block[0] = static_cast<uint8_t>(128 + std::clamp(std::ilogb(d == 0 ? 1.0f : d), -20, 20));
      return;
    case Encoding::q6_k:
      return store_u16(block + 208, f32_to_f16(d));
    case Encoding::q3_k:
      return store_u16(block + 108, f32_to_f16(d));
    case Encoding::q2_k:
      store_u16(block + 80, f32_to_f16(d));
      return store_u16(block + 82, f32_to_f16(dmin));
    case Encoding::q4_k:
    case Encoding::q5_k:
    case Encoding::q4_1:
    case Encoding::q5_1:
      store_u16(block, f32_to_f16(d));
      return store_u16(block + 2, f32_to_f16(dmin));
    default:
      if (!is_mlx(e)) return store_u16(block, f32_to_f16(d));
      const Encoding scales = mlx_format(e).scales;
      CHECK(encode_rows(scales, &d, 1, 1, block).is_ok());
      CHECK(encode_rows(scales, &dmin, 1, 1, block + encoding_info(scales).block_bytes).is_ok());
  }
}

}  // namespace smoe
