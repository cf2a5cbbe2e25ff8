#include "quant/store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

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

}  // namespace

Status store_rows(Encoding from, const uint8_t* src, uint64_t rows, uint64_t cols, Encoding to, Layout layout,
                  uint8_t* dst, const float* importance, StoreSums* sums) {
  const uint64_t in_bytes = row_bytes(from, cols), out_bytes = row_bytes(to, cols);
  const uint64_t step = std::min<uint64_t>(rows, kPanelRows);
  const bool kept = from == to, packs = layout == Layout::panel16 && !encoding_info(to).plain;
  std::vector<float> x(step * cols), decoded(kept ? 0 : step * cols);
  std::vector<uint8_t> encoded(kept ? 0 : step * out_bytes);
  for (uint64_t row = 0; row < rows; row += step, src += step * in_bytes) {
    const uint64_t count = std::min(step, rows - row), values = count * cols;
    decode_rows(from, src, values, x.data());
    const uint8_t* bytes = src;
    const float* back = x.data();
    if (!kept) {
      SMOE_TRY(encode_rows(to, x.data(), count, cols, encoded.data(), importance));
      decode_rows(to, encoded.data(), values, decoded.data());
      bytes = encoded.data();
      back = decoded.data();
    }
    for (uint64_t r = 0; r < count; ++r) add_squares(x.data() + r * cols, back + r * cols, cols, sums);
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
