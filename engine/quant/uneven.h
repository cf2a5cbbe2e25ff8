// The sixteen uneven levels of IQ4_NL and IQ4_XS.
#pragma once

#include <cstdint>

namespace smoe {

inline constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Which of them is nearest, the upper one where two are; 0 for a NaN.
inline uint8_t nearest_uneven(float x) {
  const float twice = x + x;
  uint8_t index = 0;
  for (int j = 1; j < 16; ++j)
    index = static_cast<uint8_t>(index + (twice >= static_cast<float>(kUneven[j - 1] + kUneven[j])));
  return index;
}

}  // namespace smoe
