#include "quant/strip.h"

namespace smoe {
namespace {

// Calls field(byte, shift, level bit, width) for the places that hold the level of `column`.
template <class F>
void for_fields(uint32_t bits, uint32_t column, uint32_t lane, F&& field) {
  const uint32_t g = column / 4, at = 4 * lane + column % 4;
  if (bits == 8) return field(64 * g + at, 0u, 0u, 8u);
  if (bits >= 4) {
    field(64 * (g % 4) + at, 4 * (g / 4), 0u, 4u);
    if (bits == 5) field(256 + at, g, 4u, 1u);
    if (bits == 6) field(256 + 64 * (g / 4) + at, 2 * (g % 4), 4u, 2u);
    return;
  }
  field(64 * (g / 4) + at, 2 * (g % 4), 0u, 2u);
  if (bits == 3) field(128 + at, g, 2u, 1u);
}

}  // namespace

void put_strip(uint32_t bits, const uint8_t* levels, uint32_t lane, uint8_t* strip) {
  for (uint32_t k = 0; k < kStripCols; ++k) {
    for_fields(bits, k, lane, [&](uint32_t byte, uint32_t shift, uint32_t from, uint32_t width) {
      strip[byte] = static_cast<uint8_t>(strip[byte] | (levels[k] >> from & ((1u << width) - 1)) << shift);
    });
  }
}

void get_strip(uint32_t bits, const uint8_t* strip, uint32_t lane, uint8_t* levels) {
  for (uint32_t k = 0; k < kStripCols; ++k) {
    levels[k] = 0;
    for_fields(bits, k, lane, [&](uint32_t byte, uint32_t shift, uint32_t from, uint32_t width) {
      levels[k] = static_cast<uint8_t>(levels[k] | (strip[byte] >> shift & ((1u << width) - 1)) << from);
    });
  }
}

}  // namespace smoe
