// 256 levels of 2 bits as Q2_K and Q3_K store them: of each half of 128, byte i is q[i] | q[i + 32] << 2 | q[i + 64] <<
// 4 | q[i + 96] << 6.
#pragma once

#include <cstdint>

namespace smoe {

inline void put_quarters(const uint8_t* level, uint8_t* bytes) {  // the lower two bits of each level
  for (uint32_t b = 0; b < 64; ++b) {
    const uint8_t* q = level + 128 * (b / 32) + b % 32;
    bytes[b] = static_cast<uint8_t>((q[0] & 3) | (q[32] & 3) << 2 | (q[64] & 3) << 4 | (q[96] & 3) << 6);
  }
}

inline void get_quarters(const uint8_t* bytes, uint8_t* level) {
  for (uint32_t k = 0; k < 256; ++k) level[k] = bytes[32 * (k / 128) + k % 32] >> 2 * (k % 128 / 32) & 3;
}

}  // namespace smoe
