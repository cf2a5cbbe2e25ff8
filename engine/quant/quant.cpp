// Dispatch over encodings: sizes, whole matrices from the per-block functions, and the plain encodings.
#include "quant/quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "quant/codec.h"
#include "quant/fit.h"

namespace smoe {
namespace {

constexpr EncodingInfo kPlain[] = {{"f32", 1, 4, true}, {"f16", 1, 2, true}, {"bf16", 1, 2, true}};
constexpr float kLargestHalf = 65504.0f;
constexpr float kLargestBlock = kLargestHalf * 128 * 32;  // what the widest block scale, Q6_K's, can reach

Status refuse(const char* what, float value, uint64_t index, Encoding e) {
  return Status(Code::failed,
                std::string(what) + " " + std::to_string(value) + " at flat index " + std::to_string(index) +
                    " cannot be stored as " + encoding_info(e).name,
                "the checkpoint may be damaged; compare it with its source");
}

Status check_finite(Encoding e, const float* x, uint64_t count, uint64_t index) {
  for (uint64_t i = 0; i < count; ++i) {
    if (!std::isfinite(x[i])) return refuse("non-finite weight", x[i], index + i, e);
  }
  return Status::ok();
}

uint64_t index_of_largest(const float* x, uint64_t count) {
  return static_cast<uint64_t>(
      std::max_element(x, x + count, [](float a, float b) { return std::fabs(a) < std::fabs(b); }) - x);
}

// Finite values whose 16-bit float, or whose block scale as one, would be infinite.
Status refuse_overflow(Encoding e, const float* x, uint64_t count, uint64_t index) {
  const uint64_t i = index_of_largest(x, count);
  return refuse("weight too large:", x[i], index + i, e);
}

Status encode_plain(Encoding e, const float* src, uint64_t count, uint8_t* dst) {
  SMOE_TRY(check_finite(e, src, count, 0));
  if (e == Encoding::f32) {
    std::memcpy(dst, src, count * 4);
    return Status::ok();
  }
  const uint16_t infinity = e == Encoding::f16 ? 0x7c00 : 0x7f80;
  for (uint64_t i = 0; i < count; ++i) {
    const uint16_t h = e == Encoding::f16 ? f32_to_f16(src[i]) : f32_to_bf16(src[i]);
    if ((h & 0x7fff) == infinity) return refuse_overflow(e, src + i, 1, i);
    store_u16(dst + 2 * i, h);
  }
  return Status::ok();
}

void decode_plain(Encoding e, const uint8_t* src, uint64_t count, float* dst) {
  switch (e) {
    case Encoding::f16:
      for (uint64_t i = 0; i < count; ++i) dst[i] = f16_to_f32(load_u16(src + 2 * i));
      return;
    case Encoding::bf16:
      return fitter().widen(src, count, dst);
    default:
      if (count > 0) std::memcpy(dst, src, count * 4);
  }
}

bool scales_are_finite(const Codec& c, const uint8_t* block) {
  Levels levels;
  c.levels(block, &levels);
  return std::isfinite(levels.d) && std::isfinite(levels.dmin);
}

}  // namespace

const Codec& codec(Encoding e) {
  static constexpr const Codec* kCodecs[] = {&kCodecQ8_0, &kCodecQ4_0, &kCodecQ4_K,  &kCodecQ6_K,  &kCodecQ4_1,
                                             &kCodecQ5_0, &kCodecQ5_1, &kCodecMxfp4, &kCodecIq4Nl, &kCodecQ2_K,
                                             &kCodecQ3_K, &kCodecQ5_K, &kCodecIq4Xs};
  if (is_mlx(e)) return mlx_codec(e);
  return *kCodecs[static_cast<size_t>(e) - std::size(kPlain)];
}

const std::vector<Encoding>& all_encodings() {
  static const std::vector<Encoding> all = [] {
    std::vector<Encoding> found;
    for (size_t i = 0; i <= static_cast<size_t>(Encoding::mlx_last); ++i) found.push_back(static_cast<Encoding>(i));
    return found;
  }();
  return all;
}

const EncodingInfo& encoding_info(Encoding e) {
  const auto i = static_cast<size_t>(e);
  return i < std::size(kPlain) ? kPlain[i] : codec(e).info;
}

uint64_t row_bytes(Encoding e, uint64_t cols) {
  const EncodingInfo& info = encoding_info(e);
  return cols % info.block_values == 0 ? cols / info.block_values * info.block_bytes : 0;
}

uint64_t stored_bytes(Encoding e, Layout layout, uint64_t rows, uint64_t cols) {
  if (layout == Layout::panel16) rows = (rows + kPanelRows - 1) / kPanelRows * kPanelRows;
  return rows * row_bytes(e, cols);
}

namespace {

// Some neighbouring blocks; `index` is that of their first value in the whole matrix.
Status encode_blocks(Encoding e, const Codec& c, const float* src, uint32_t blocks, uint64_t index, const BlockFit& fit,
                     uint8_t* dst) {
  const uint64_t values = uint64_t{c.info.block_values} * blocks;
  const uint32_t bits = fitter().largest(src, values);
  if (bits >= 0x7f800000) return check_finite(e, src, values, index);
  const float largest = std::bit_cast<float>(bits);
  if (largest > kLargestBlock) return refuse_overflow(e, src, values, index);
  blocks > 1 ? c.encode_together(src, blocks, fit, dst) : c.encode_block(src, fit, dst);
  for (uint32_t b = 0; largest > kLargestHalf && b < blocks; ++b) {
    if (!scales_are_finite(c, dst + uint64_t{c.info.block_bytes} * b)) {
      return refuse_overflow(e, src + uint64_t{c.info.block_values} * b, c.info.block_values,
                             index + uint64_t{c.info.block_values} * b);
    }
  }
  return Status::ok();
}

// How many of so many blocks to encode at once: a power of two, so that vectors are filled.
uint32_t together(uint64_t blocks) {
  return static_cast<uint32_t>(std::bit_floor(std::min<uint64_t>(blocks, kMostTogether)));
}

// One row of blocks, or, without importance, several; `index` is that of its first value in the whole matrix.
Status encode_row(Encoding e, const float* src, uint64_t cols, uint64_t index, BlockFit fit, uint8_t* dst) {
  const Codec& c = codec(e);
  const float* importance = fit.importance;
  if (importance != nullptr) {
    float sum = 0;
    for (uint64_t k = 0; k < cols; ++k) sum += src[k] * src[k];
    fit.mean_square = sum / static_cast<float>(cols);
  }
  for (uint64_t k = 0; k < cols;) {
    const uint32_t blocks = c.encode_together == nullptr ? 1 : together((cols - k) / c.info.block_values);
    if (importance != nullptr) fit.importance = importance + k;
    SMOE_TRY(encode_blocks(e, c, src + k, blocks, index + k, fit, dst));
    k += uint64_t{c.info.block_values} * blocks;
    dst += uint64_t{c.info.block_bytes} * blocks;
  }
  return Status::ok();
}

}  // namespace

Status encode_rows(Encoding e, const float* src, uint64_t rows, uint64_t cols, uint8_t* dst, const float* importance,
                   MlxRule rule) {
  if (encoding_info(e).plain) return encode_plain(e, src, rows * cols, dst);
  const EncodingInfo& info = encoding_info(e);
  if (cols % info.block_values != 0) {
    return Status(Code::usage, std::string("rows of ") + std::to_string(cols) + " values do not divide into " +
                                   info.name + " blocks of " + std::to_string(info.block_values));
  }
  if (importance == nullptr) return encode_row(e, src, rows * cols, 0, {nullptr, 0, rule}, dst);
  const uint64_t bytes = row_bytes(e, cols);
  for (uint64_t r = 0; r < rows; ++r) {
    SMOE_TRY(encode_row(e, src + r * cols, cols, r * cols, {importance, 0, rule}, dst + r * bytes));
  }
  return Status::ok();
}

void decode_rows(Encoding e, const uint8_t* src, uint64_t count, float* dst) {
  if (encoding_info(e).plain) return decode_plain(e, src, count, dst);
  const Codec& c = codec(e);
  for (uint64_t i = 0; i < count; i += c.info.block_values, src += c.info.block_bytes) c.decode_block(src, dst + i);
}

void pack_panels(Encoding e, const uint8_t* src, uint64_t rows, uint64_t cols, uint8_t* dst) {
  if (encoding_info(e).plain) {
    std::memcpy(dst, src, rows * row_bytes(e, cols));
    return;
  }
  const Codec& c = codec(e);
  const uint64_t row_size = row_bytes(e, cols), blocks = cols / c.info.block_values;
  const uint8_t zero[kMaxBlockBytes] = {};
  for (uint64_t row0 = 0; row0 < rows; row0 += kPanelRows) {
    for (uint64_t b = 0; b < blocks; ++b, dst += kPanelRows * c.info.block_bytes) {
      std::memset(dst, 0, kPanelRows * c.info.block_bytes);
      for (uint32_t lane = 0; lane < kPanelRows; ++lane) {
        const bool there = row0 + lane < rows;
        c.pack_block(there ? src + (row0 + lane) * row_size + b * c.info.block_bytes : zero, lane, dst);
      }
    }
  }
}

void unpack_panels(Encoding e, const uint8_t* src, uint64_t rows, uint64_t cols, uint8_t* dst) {
  if (encoding_info(e).plain) {
    std::memcpy(dst, src, rows * row_bytes(e, cols));
    return;
  }
  const Codec& c = codec(e);
  const uint64_t row_size = row_bytes(e, cols), blocks = cols / c.info.block_values;
  for (uint64_t row = 0; row < rows; ++row) {
    const uint8_t* panel = src + row / kPanelRows * kPanelRows * row_size;
    for (uint64_t b = 0; b < blocks; ++b, dst += c.info.block_bytes) {
      c.unpack_block(panel + b * kPanelRows * c.info.block_bytes, static_cast<uint32_t>(row % kPanelRows), dst);
    }
  }
}

void decode_row(Encoding e, Layout layout, const uint8_t* matrix, uint64_t rows, uint64_t cols, uint64_t row,
                float* dst) {
  (void)rows;
  const uint64_t row_size = row_bytes(e, cols);
  if (layout == Layout::rows || encoding_info(e).plain) return decode_rows(e, matrix + row * row_size, cols, dst);
  const Codec& c = codec(e);
  const uint8_t* panel = matrix + row / kPanelRows * kPanelRows * row_size;
  uint8_t block[kMaxBlockBytes];
  for (uint64_t k = 0; k < cols; k += c.info.block_values, panel += kPanelRows * c.info.block_bytes) {
    c.unpack_block(panel, static_cast<uint32_t>(row % kPanelRows), block);
    c.decode_block(block, dst + k);
  }
}

namespace {

// MLX's encoding of the same bits and scales in groups of 64 or 32.
Encoding smaller_group(const MlxFormat& wanted, uint64_t cols) {
  const uint32_t group = cols % 64 == 0 ? 64 : 32;
  for (const Encoding e : all_encodings()) {
    if (!is_mlx(e)) continue;
    const MlxFormat f = mlx_format(e);
    if (f.bits == wanted.bits && f.scales == wanted.scales && f.group == group) return e;
  }
  return Encoding::q8_0;
}

}  // namespace

Encoding fallback_encoding(Encoding wanted, uint64_t cols) {
  if (cols % encoding_info(wanted).block_values == 0) return wanted;
  if (cols % 32 != 0) return Encoding::f16;
  if (is_mlx(wanted)) return smaller_group(mlx_format(wanted), cols);
  switch (wanted) {
    case Encoding::q4_k:
      return Encoding::q5_0;
    case Encoding::q5_k:
      return Encoding::q5_1;
    case Encoding::q2_k:
    case Encoding::q3_k:
    case Encoding::iq4_xs:
      return Encoding::iq4_nl;
    default:
      return Encoding::q8_0;
  }
}

}  // namespace smoe
