// MLX affine: groups of 32, 64 or 128 values at 2 3 4 5 6 or 8 bits, with a scale and a bias in bf16, f16 or f32.
//
// Block: the scale, the bias, then group * bits / 8 bytes, the levels as one stream of bits from the lowest bit of the
// first byte on. MLX keeps the three in arrays of their own, .scales, .biases and .weight, whose rows are these blocks'
// parts in order. value = scale * q + bias. Panel block (16 times as much): 16 x scale, one per row; 16 x bias; group /
// 32 strips (strip.h).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "quant/codec.h"
#include "quant/strip.h"

namespace smoe {
namespace {

constexpr uint32_t kBits[] = {2, 3, 4, 5, 6, 8}, kGroups[] = {32, 64, 128};
constexpr Encoding kScales[] = {Encoding::bf16, Encoding::f16, Encoding::f32};
constexpr int kFirst = static_cast<int>(Encoding::mlx_first);
constexpr int kCount = std::size(kBits) * std::size(kGroups) * std::size(kScales);
constexpr uint32_t kMostGroup = 128;
static_assert(static_cast<int>(Encoding::mlx_last) == kFirst + kCount - 1);

constexpr MlxFormat format_of(int i) { return {kBits[i / 9], kGroups[i / 3 % 3], kScales[i % 3]}; }
constexpr uint32_t scale_bytes(const MlxFormat& f) { return f.scales == Encoding::f32 ? 4 : 2; }
constexpr uint32_t block_bytes(const MlxFormat& f) { return 2 * scale_bytes(f) + f.group * f.bits / 8; }

void put_levels(const MlxFormat& f, const uint8_t* level, uint8_t* bytes) {
  uint32_t held = 0, width = 0;
  for (uint32_t k = 0; k < f.group; ++k) {
    held |= static_cast<uint32_t>(level[k]) << width;
    for (width += f.bits; width >= 8; width -= 8, held >>= 8) *bytes++ = static_cast<uint8_t>(held);
  }
}

void get_levels(const MlxFormat& f, const uint8_t* bytes, uint8_t* level) {
  uint32_t held = 0, width = 0;
  for (uint32_t k = 0; k < f.group; ++k, held >>= f.bits, width -= f.bits) {
    if (width < f.bits) {
      held |= static_cast<uint32_t>(*bytes++) << width;
      width += 8;
    }
    level[k] = static_cast<uint8_t>(held & ((1u << f.bits) - 1));
  }
}

float get_scale(const MlxFormat& f, const uint8_t* p) {
  float x;
  decode_rows(f.scales, p, 1, &x);
  return x;
}

void put_scale(const MlxFormat& f, float x, uint8_t* p) {
  if (f.scales == Encoding::f32) {
    std::memcpy(p, &x, 4);
  } else {
    store_u16(p, f.scales == Encoding::f16 ? f32_to_f16(x) : f32_to_bf16(x));
  }
}

// Half away from zero on the GPU, half to even on the CPU.
float rounded(float x, MlxRule rule) { return rule == MlxRule::gpu ? std::round(x) : std::nearbyint(x); }

void encode(const MlxFormat& f, const float* x, const BlockFit& fit, uint8_t* block) {
  const float most = static_cast<float>((1u << f.bits) - 1);
  const float low = *std::min_element(x, x + f.group);
  float high = *std::max_element(x, x + f.group);
  if (fit.rule == MlxRule::gpu) high = std::max(high, 0.0f);
  float scale = std::max((high - low) / most, 1e-7f), bias = 0;
  const bool from_low = std::fabs(low) > std::fabs(high);
  const float edge = from_low ? low : high;
  if (!from_low) scale = -scale;
  const float level_at_edge = rounded(edge / scale, fit.rule);
  if (level_at_edge != 0) {
    scale = edge / level_at_edge;
    bias = edge;
  }
  uint8_t level[kMostGroup];
  for (uint32_t k = 0; k < f.group; ++k) {
    level[k] = static_cast<uint8_t>(std::clamp(rounded((x[k] - bias) / scale, fit.rule), 0.0f, most));
  }
  put_scale(f, scale, block);
  put_scale(f, bias, block + scale_bytes(f));
  put_levels(f, level, block + 2 * scale_bytes(f));
}

void levels(const MlxFormat& f, const uint8_t* block, Levels* out) {
  out->d = get_scale(f, block);
  out->dmin = -get_scale(f, block + scale_bytes(f));
  out->sub = f.group;
  out->has_min = true;
  uint8_t level[kMostGroup];
  get_levels(f, block + 2 * scale_bytes(f), level);
  std::copy(level, level + f.group, out->q);
}

void pack(const MlxFormat& f, const uint8_t* block, uint32_t lane, uint8_t* panel) {
  const uint32_t size = scale_bytes(f);
  std::memcpy(panel + size * lane, block, size);
  std::memcpy(panel + size * (16 + lane), block + size, size);
  uint8_t level[kMostGroup];
  get_levels(f, block + 2 * size, level);
  for (uint32_t i = 0; i < f.group / kStripCols; ++i) {
    put_strip(f.bits, level + kStripCols * i, lane, panel + 32 * size + strip_bytes(f.bits) * i);
  }
}

void unpack(const MlxFormat& f, const uint8_t* panel, uint32_t lane, uint8_t* block) {
  const uint32_t size = scale_bytes(f);
  std::memcpy(block, panel + size * lane, size);
  std::memcpy(block + size, panel + size * (16 + lane), size);
  uint8_t level[kMostGroup];
  for (uint32_t i = 0; i < f.group / kStripCols; ++i) {
    get_strip(f.bits, panel + 32 * size + strip_bytes(f.bits) * i, lane, level + kStripCols * i);
  }
  put_levels(f, level, block + 2 * size);
}

// The codec of format i: the functions above with their first argument bound.
template <int I>
struct Bound {
  static constexpr MlxFormat kFormat = format_of(I);

  static constexpr auto kName = [] {  // "mlx4_g64_bf16"
    std::array<char, 16> name = {'m', 'l', 'x', static_cast<char>('0' + kFormat.bits), '_', 'g'};
    size_t at = 6;
    for (uint32_t place = 100; place > 0; place /= 10) {
      if (kFormat.group >= place) name[at++] = static_cast<char>('0' + kFormat.group / place % 10);
    }
    name[at++] = '_';
    for (const char* c = kFormat.scales == Encoding::bf16  ? "bf16"
                         : kFormat.scales == Encoding::f16 ? "f16"
                                                           : "f32";
         *c;) {
      name[at++] = *c++;
    }
    return name;
  }();

  static void encode_block(const float* x, const BlockFit& fit, uint8_t* block) { encode(kFormat, x, fit, block); }
  static void levels_of(const uint8_t* block, Levels* out) { levels(kFormat, block, out); }
  static void pack_block(const uint8_t* block, uint32_t lane, uint8_t* panel) { pack(kFormat, block, lane, panel); }
  static void unpack_block(const uint8_t* panel, uint32_t lane, uint8_t* block) { unpack(kFormat, panel, lane, block); }

  static constexpr Codec codec() {
    return {{kName.data(), kFormat.group, block_bytes(kFormat), false},
            encode_block,
            decode_from_levels<levels_of, kFormat.group>,
            levels_of,
            pack_block,
            unpack_block};
  }
};

template <int... I>
constexpr std::array<Codec, sizeof...(I)> bind(std::integer_sequence<int, I...>) {
  return {Bound<I>::codec()...};
}

constexpr std::array<Codec, kCount> kCodecs = bind(std::make_integer_sequence<int, kCount>{});

}  // namespace

bool is_mlx(Encoding e) { return e >= Encoding::mlx_first && e <= Encoding::mlx_last; }

MlxFormat mlx_format(Encoding e) { return format_of(static_cast<int>(e) - kFirst); }

const Codec& mlx_codec(Encoding e) { return kCodecs[static_cast<size_t>(static_cast<int>(e) - kFirst)]; }

}  // namespace smoe
