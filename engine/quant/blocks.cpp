// Small things that the encodings' files share.
#include <algorithm>
#include <cmath>

#include "quant/codec.h"

namespace smoe {

void importance_weights(const float* x, const float* importance, float mean_square, uint32_t n, float* w) {
  for (uint32_t k = 0; k < n; ++k) w[k] = importance[k] * std::sqrt(mean_square + x[k] * x[k]);
}

uint8_t truncate_level(float x, int32_t most) {
  if (!std::isfinite(x)) return 0;
  return static_cast<uint8_t>(std::clamp(static_cast<int32_t>(x), 0, most));
}

void put_nibbles(const uint8_t* level, uint8_t* bytes) {
  for (uint32_t j = 0; j < 16; ++j) bytes[j] = static_cast<uint8_t>((level[j] & 15) | (level[j + 16] & 15) << 4);
}

void get_nibbles(const uint8_t* bytes, uint8_t* level) {
  for (uint32_t j = 0; j < 16; ++j) {
    level[j] = bytes[j] & 15;
    level[j + 16] = bytes[j] >> 4;
  }
}

}  // namespace smoe
