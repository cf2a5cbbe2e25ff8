#include "quant/strip.h"

#include <cstring>

namespace smoe {
namespace {

// Four neighbouring columns of a row are one 32-bit word, whose bytes are treated alike.
uint32_t load_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

void store_u32(uint8_t* p, uint32_t v) { std::memcpy(p, &v, sizeof(v)); }

constexpr uint32_t kOnes = 0x01010101, kTwos = 0x03030303, kFours = 0x0f0f0f0f;
constexpr uint32_t kGroups = kStripCols / 4;

// Bits `from` and up of all columns, 8 / fields of them each: group g in byte plane g / fields, field g % fields.
void put_fields(const uint8_t* levels, uint32_t from, uint32_t mask, uint32_t fields, uint8_t* plane) {
  const uint32_t width = 8 / fields;
  for (uint32_t p = 0; p < kGroups / fields; ++p) {
    uint32_t word = 0;
    for (uint32_t f = 0; f < fields; ++f) {
      word |= (load_u32(levels + 4 * (fields * p + f)) >> from & mask) << width * f;
    }
    store_u32(plane + 64 * p, word);
  }
}

void get_fields(const uint8_t* plane, uint32_t from, uint32_t mask, uint32_t fields, uint8_t* levels) {
  const uint32_t width = 8 / fields;
  for (uint32_t g = 0; g < kGroups; ++g) {
    const uint32_t word = load_u32(plane + 64 * (g / fields)) >> width * (g % fields) & mask;
    store_u32(levels + 4 * g, load_u32(levels + 4 * g) | word << from);
  }
}

}  // namespace

void put_strip(uint32_t bits, const uint8_t* levels, uint32_t lane, uint8_t* strip) {
  uint8_t* at = strip + 4 * lane;
  if (bits == 8) {
    for (uint32_t g = 0; g < kGroups; ++g) store_u32(at + 64 * g, load_u32(levels + 4 * g));
  } else if (bits >= 4) {
    for (uint32_t g = 0; g < 4; ++g) {
      const uint32_t low = load_u32(levels + 4 * g) & kFours, high = load_u32(levels + 16 + 4 * g) & kFours;
      store_u32(at + 64 * g, low | high << 4);
    }
    if (bits == 5) put_fields(levels, 4, kOnes, 8, at + 256);
    if (bits == 6) put_fields(levels, 4, kTwos, 4, at + 256);
  } else {
    put_fields(levels, 0, kTwos, 4, at);
    if (bits == 3) put_fields(levels, 2, kOnes, 8, at + 128);
  }
}

void get_strip(uint32_t bits, const uint8_t* strip, uint32_t lane, uint8_t* levels) {
  const uint8_t* at = strip + 4 * lane;
  std::memset(levels, 0, kStripCols);
  if (bits == 8) {
    for (uint32_t g = 0; g < kGroups; ++g) store_u32(levels + 4 * g, load_u32(at + 64 * g));
  } else if (bits >= 4) {
    for (uint32_t g = 0; g < kGroups; ++g) {
      store_u32(levels + 4 * g, load_u32(at + 64 * (g % 4)) >> 4 * (g / 4) & kFours);
    }
    if (bits == 5) get_fields(at + 256, 4, kOnes, 8, levels);
    if (bits == 6) get_fields(at + 256, 4, kTwos, 4, levels);
  } else {
    get_fields(at, 0, kTwos, 4, levels);
    if (bits == 3) get_fields(at + 128, 2, kOnes, 8, levels);
  }
}

}  // namespace smoe
