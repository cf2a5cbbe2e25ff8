// The norms of the residual stream: RMS norm (Zhang & Sennrich 2019), or layer norm with a bias (Ba et al. 2016).
#pragma once

#include "blocks/linear.h"
#include "smoe/model.h"

namespace smoe {

struct NormWeights {
  const float* weight = nullptr;  // [n]; null where there is no such norm
  const float* bias = nullptr;    // [n], layer norm only
};

// One row of n values; out may be x.
void normalize_row(const Compute& c, NormKind kind, const NormWeights& w, const float* x, size_t n, float eps,
                   float* out);

}  // namespace smoe
