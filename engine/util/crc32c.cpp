#include "util/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace smoe {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as little-endian");

constexpr uint32_t kPolynomial = 0x82F63B78u;

// kSlice[k][b]: the register after byte b and k zero bytes.
using SliceTable = std::array<std::array<uint32_t, 256>, 8>;
constexpr SliceTable make_slices() {
  SliceTable t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t c = b;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    t[0][b] = c;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 255];
  }
  return t;
}
constexpr SliceTable kSlice = make_slices();

uint64_t load64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

#if defined(__x86_64__)

// The instruction takes 3 cycles but one can start every cycle, so three stretches of kStretch bytes run side by side.
// To join them, a register is moved over kStretch zero bytes: a linear map, kept as four tables of 256.
constexpr size_t kStretch = 4096;

using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;
constexpr ShiftTable make_shift(size_t bytes) {
  std::array<uint32_t, 32> image{};  // of each single bit
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t c = uint32_t{1} << bit;
    for (size_t i = 0; i < bytes; ++i) c = (c >> 8) ^ kSlice[0][c & 255];
    image[bit] = c;
  }
  ShiftTable t{};
  for (int part = 0; part < 4; ++part) {
    for (uint32_t b = 0; b < 256; ++b) {
      for (int bit = 0; bit < 8; ++bit) t[part][b] ^= (b >> bit & 1) ? image[part * 8 + bit] : 0;
    }
  }
  return t;
}

const ShiftTable& shift_table() {
  static const ShiftTable table = make_shift(kStretch);
  return table;
}

uint32_t shift(const ShiftTable& t, uint64_t c) {
  return t[0][c & 255] ^ t[1][c >> 8 & 255] ^ t[2][c >> 16 & 255] ^ t[3][c >> 24 & 255];
}

__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(const uint8_t* p, size_t n, uint32_t crc) {
  const ShiftTable& table = shift_table();
  uint64_t c = ~crc;
  for (; n >= 3 * kStretch; p += 3 * kStretch, n -= 3 * kStretch) {
    uint64_t c1 = 0, c2 = 0;
    for (size_t i = 0; i < kStretch; i += 8) {
      c = _mm_crc32_u64(c, load64(p + i));
      c1 = _mm_crc32_u64(c1, load64(p + kStretch + i));
      c2 = _mm_crc32_u64(c2, load64(p + 2 * kStretch + i));
    }
    c = shift(table, shift(table, c) ^ c1) ^ c2;
  }
  for (; n >= 8; p += 8, n -= 8) c = _mm_crc32_u64(c, load64(p));
  for (; n > 0; ++p, --n) c = _mm_crc32_u8(static_cast<uint32_t>(c), *p);
  return ~static_cast<uint32_t>(c);
}

#endif

}  // namespace

uint32_t crc32c_portable(const void* data, size_t n, uint32_t crc) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint32_t c = ~crc;
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t v = load64(p) ^ c;
    c = kSlice[7][v & 255] ^ kSlice[6][v >> 8 & 255] ^ kSlice[5][v >> 16 & 255] ^ kSlice[4][v >> 24 & 255] ^
        kSlice[3][v >> 32 & 255] ^ kSlice[2][v >> 40 & 255] ^ kSlice[1][v >> 48 & 255] ^ kSlice[0][v >> 56];
  }
  for (; n > 0; ++p, --n) c = (c >> 8) ^ kSlice[0][(c ^ *p) & 255];
  return ~c;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("sse4.2");
  if (fast) return crc32c_sse42(static_cast<const uint8_t*>(data), bytes, crc);
#endif
  return crc32c_portable(data, bytes, crc);
}

}  // namespace smoe
