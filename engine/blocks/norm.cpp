#include "blocks/norm.h"

#include <cmath>

namespace smoe {
namespace {

void layer_norm(const NormWeights& w, const float* x, size_t n, float eps, float* out) {
  double sum = 0, squares = 0;  // in double: the mean may be far larger than the deviation
  for (size_t i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / static_cast<double>(n);
  for (size_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const auto inverse = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(n) + eps));
  const auto centre = static_cast<float>(mean);
  for (size_t i = 0; i < n; ++i) out[i] = (x[i] - centre) * inverse * w.weight[i] + w.bias[i];
}

}  // namespace

void normalize_row(const Compute& c, NormKind kind, const NormWeights& w, const float* x, size_t n, float eps,
                   float* out) {
  if (kind == NormKind::layer) return layer_norm(w, x, n, eps, out);
  c.kernels->rms_norm(x, w.weight, n, eps, out);
}

}  // namespace smoe
