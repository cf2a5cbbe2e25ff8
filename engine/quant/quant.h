// Encodings: layout, encode, decode. Scalar code here is the truth that every kernel is compared with.
//
// `rows` layout is byte for byte what the ecosystem writes (GGUF blocks; IEEE little-endian for plain). `panel16` holds
// the same blocks of 16 consecutive rows interleaved (rows padded with zero blocks to a multiple of 16); one function
// per encoding knows the arrangement, described in its file and in vault/FORMAT.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "smoe/model.h"
#include "smoe/status.h"

namespace smoe {

struct EncodingInfo {
  const char* name;
  uint32_t block_values;  // values per block along a row; a row's cols must be a multiple
  uint32_t block_bytes;
  bool plain;  // f32 f16 bf16: no panels
};
const EncodingInfo& encoding_info(Encoding e);
const std::vector<Encoding>& all_encodings();  // in the order of the enumeration

inline constexpr uint32_t kPanelRows = 16;

struct MlxFormat {
  uint32_t bits, group;
  Encoding scales;  // bf16, f16 or f32
};
bool is_mlx(Encoding e);
MlxFormat mlx_format(Encoding e);  // of an encoding that is_mlx

// MLX's builds differ in how they quantise: published files follow its GPU builds.
enum class MlxRule : uint8_t { gpu, cpu };

// Bytes of one row in `rows` layout; 0 if cols does not divide into blocks.
uint64_t row_bytes(Encoding e, uint64_t cols);
// Bytes a [rows, cols] matrix takes as stored.
uint64_t stored_bytes(Encoding e, Layout layout, uint64_t rows, uint64_t cols);

// float32 [rows, cols] -> `rows` layout. A non-finite value, or a finite one whose 16-bit float or block scale would
// not be finite, is Code::failed with its flat index in the message. importance: null, or how much an error in each
// column matters, [cols], finite and not negative; the searches of Q4_0, Q4_1, Q5, IQ4 and the K encodings use it.
// rule: of MLX's encodings.
Status encode_rows(Encoding e, const float* src, uint64_t rows, uint64_t cols, uint8_t* dst,
                   const float* importance = nullptr, MlxRule rule = MlxRule::gpu);
// `rows` layout -> float32; count is a multiple of block_values.
void decode_rows(Encoding e, const uint8_t* src, uint64_t count, float* dst);

// `rows` layout <-> panel16, exact in both directions. dst of pack has stored_bytes(e, panel16, rows, cols).
void pack_panels(Encoding e, const uint8_t* src, uint64_t rows, uint64_t cols, uint8_t* dst);
void unpack_panels(Encoding e, const uint8_t* src, uint64_t rows, uint64_t cols, uint8_t* dst);

// One row of a stored matrix to float32 (the embedding lookup), either layout.
void decode_row(Encoding e, Layout layout, const uint8_t* matrix, uint64_t rows, uint64_t cols, uint64_t row,
                float* dst);

// Where a row length does not divide, as llama.cpp chooses: Q4_K -> Q5_0, Q5_K -> Q5_1, Q2_K Q3_K IQ4_XS -> IQ4_NL,
// others -> Q8_0; MLX's -> the same in groups of 64 or 32; not divisible by 32 -> f16.
Encoding fallback_encoding(Encoding wanted, uint64_t cols);

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);  // round to nearest even
float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float f);

}  // namespace smoe
