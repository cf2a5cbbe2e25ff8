// A source's rows into their place in a vault: to float32, encoded, measured and packed, sixteen rows at a time, so
// that nothing in between leaves the processor's cache.
#pragma once

#include <cstdint>

#include "quant/quant.h"

namespace smoe {

struct StoreSums {
  double error = 0, norm = 0;  // of (stored - source)^2 and of source^2; not finite where a value is not
};

// src: [rows, cols] as `from`, which is plain, or `to` itself: then the bytes are kept. dst: `to` in `layout`; rows are
// whole panels but for the matrix's last. importance as in encode_rows, whose errors these are.
Status store_rows(Encoding from, const uint8_t* src, uint64_t rows, uint64_t cols, Encoding to, Layout layout,
                  uint8_t* dst, const float* importance, StoreSums* sums);

}  // namespace smoe
