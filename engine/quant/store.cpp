#include "quant/store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "quant/codec.h"
#include "quant/fit.h"

namespace smoe {
namespace {

// What a float32 sum of squares cannot hold is summed up again in float64.
void add_squares(const float* x, const float* y, uint64_t n, StoreSums* sums) {
  double error = 0, norm = 0;
  fitter().squares(x, y, n, &error, &norm);
  if (!std::isfinite(error + norm)) {
    error = norm = 0;
    for (uint64_t k = 0; k < n; ++k) {
      const double a = static_cast<double>(x[k]), difference = static_cast<double>(y[k]) - a;
      error += difference * difference;
      norm += a * a;
    }
  }
  sums->error += error;
  sums->norm += norm;
}

// Rows at a time: the fewest whose blocks fill the encoders, so that what is decoded stays in the first cache.
uint64_t rows_together(Encoding e, uint64_t cols) {
  const uint64_t blocks = cols / encoding_info(e).block_values;
  uint64_t rows = 1;
  while (rows < kPanelRows && rows * blocks % kMostTogether != 0) rows *= 2;
  return rows;
}

// Asks for what is needed next while this is encoded: each row is in a page of its own, where the processor has to be
// told to look.
void prefetch(const uint8_t* at, uint64_t bytes) {
  for (uint64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b);
}

// Encodes and decodes `rows` rows piece by piece; `encoded` takes all of them.
class Pieces {
 public:
  Pieces(Encoding from, Encoding to, uint64_t cols, const float* importance)
      : from_(from), to_(to), cols_(cols), step_(rows_together(to, cols)), importance_(importance) {
    x_.resize(step_ * cols);
    back_.resize(from == to ? 0 : step_ * cols);
  }

  Status encode(const uint8_t* src, uint64_t rows, uint8_t* encoded, StoreSums* sums) {
    for (uint64_t row = 0; row < rows; row += step_) {
      const uint64_t count = std::min(step_, rows - row), values = count * cols_;
      const uint8_t* at = src + row * row_bytes(from_, cols_);
      decode_rows(from_, at, values, x_.data());
      if (row + count < rows) prefetch(at + row_bytes(from_, count * cols_), row_bytes(from_, count * cols_));
      if (from_ != to_) {
        uint8_t* out = encoded + row * row_bytes(to_, cols_);
        SMOE_TRY(encode_rows(to_, x_.data(), count, cols_, out, importance_));
        decode_rows(to_, out, values, back_.data());
      }
      const float* back = from_ == to_ ? x_.data() : back_.data();
      for (uint64_t r = 0; r < count; ++r) add_squares(x_.data() + r * cols_, back + r * cols_, cols_, sums);
    }
    return Status::ok();
  }

 private:
  const Encoding from_, to_;
  const uint64_t cols_, step_;
  const float* importance_;
  std::vector<float> x_, back_;
};

}  // namespace

Status store_rows(Encoding from, const uint8_t* src, uint64_t rows, uint64_t cols, Encoding to, Layout layout,
                  uint8_t* dst, const float* importance, StoreSums* sums) {
  const uint64_t in_bytes = row_bytes(from, cols), out_bytes = row_bytes(to, cols);
  const uint64_t step = std::min<uint64_t>(rows, kPanelRows);
  const bool kept = from == to, packs = layout == Layout::panel16 && !encoding_info(to).plain;
  Pieces pieces(from, to, cols, importance);
  std::vector<uint8_t> encoded(kept ? 0 : step * out_bytes);
  for (uint64_t row = 0; row < rows; row += step, src += step * in_bytes) {
    const uint64_t count = std::min(step, rows - row);
    SMOE_TRY(pieces.encode(src, count, encoded.data(), sums));
    const uint8_t* bytes = kept ? src : encoded.data();
    if (packs) {
      pack_panels(to, bytes, count, cols, dst);
    } else {
      std::memcpy(dst, bytes, count * out_bytes);
    }
    dst += stored_bytes(to, layout, count, cols);
  }
  return Status::ok();
}

}  // namespace smoe
