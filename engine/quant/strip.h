// A strip: 32 columns of the sixteen rows of a panel, levels of 2 3 4 5 6 or 8 bits in 64 * bits bytes. How every
// encoding but Q8_0, Q4_0, Q4_K and Q6_K arranges its levels in panels (Q4_0's and Q4_K's are strips of 4 bits too).
//
// Group g, g < 8, is columns 4g..4g+3 of every row; in a plane of 64 bytes, byte 4 * row + i belongs to column i of the
// groups that it holds:
//   8 bits     8 planes, one a group
//   4 5 6      4 planes of nibbles: plane p holds group p below and group p + 4 above; then the upper bits,
//              5: one plane, bit g of group g;  6: two planes of four groups, two bits each, lowest first
//   2 3        2 planes of four groups, two bits each, lowest first;  3: then one plane, bit g is the upper bit of
//   group g
#pragma once

#include <cstdint>

namespace smoe {

inline constexpr uint32_t kStripCols = 32;

constexpr uint32_t strip_bytes(uint32_t bits) { return 64 * bits; }

// One row's 32 levels into its lane of a zeroed strip, and back.
void put_strip(uint32_t bits, const uint8_t* levels, uint32_t lane, uint8_t* strip);
void get_strip(uint32_t bits, const uint8_t* strip, uint32_t lane, uint8_t* levels);

}  // namespace smoe
