#include "quant/fit.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/codec.h"
#include "quant/uneven.h"
#include "util/cpu_features.h"

namespace smoe {
namespace {

namespace any_cpu {
#include "quant/fit_lanes.h"
}  // namespace any_cpu

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#include "quant/fit_lanes.h"
}  // namespace avx2
#pragma GCC pop_options

bool wide() { return cpu_features().avx2; }
#else
namespace avx2 = any_cpu;

bool wide() { return false; }
#endif

float square_error(uint32_t n, int32_t most, const float* x, const float* w, float inverse) {
  const float scale = 1 / inverse;
  float error = 0;
  for (uint32_t k = 0; k < n; ++k) {
    const float difference = x[k] - scale * static_cast<float>(std::min(most, round_even(inverse * x[k])));
    error += w[k] * difference * difference;
  }
  return error;
}

struct ScaleSums {
  float lx = 0, l2 = 0;  // over w x l and w l^2
};

// One pass over the levels, see improve in fit_lanes.h.
bool improve(uint32_t n, int32_t most, const float* x, const float* w, uint8_t* level, ScaleSums* sums) {
  bool changed = false;
  for (uint32_t k = 0; k < n; ++k) {
    const float l = level[k];
    float lx = sums->lx - w[k] * x[k] * l, l2 = sums->l2 - w[k] * l * l;
    if (!(lx > 0 && l2 > 0)) continue;
    const int32_t moved = std::min(most, round_even(x[k] * l2 / lx));
    if (moved == level[k]) continue;
    const float next = static_cast<float>(moved);
    lx += w[k] * x[k] * next;
    l2 += w[k] * next * next;
    if (!(lx * lx * sums->l2 > sums->lx * sums->lx * l2)) continue;
    level[k] = static_cast<uint8_t>(moved);
    *sums = {lx, l2};
    changed = true;
  }
  return changed;
}

}  // namespace

float fit_scales(uint32_t n, int32_t most, const float* x, const float* w, uint8_t* level) {
  constexpr float kTiny = 1e-15f;
  float largest = 0;
  for (uint32_t k = 0; k < n; ++k) largest = std::max(largest, x[k]);
  if (largest < kTiny) {
    std::fill(level, level + n, static_cast<uint8_t>(0));
    return 0;
  }
  const float top = static_cast<float>(most);
  float inverse = top / largest;
  float best = square_error(n, most, x, w, inverse);
  for (int t = -4; t <= 4; ++t) {
    if (t == 0) continue;
    const float trial = (0.1f * static_cast<float>(t) + top) / largest;
    const float error = square_error(n, most, x, w, trial);
    if (!(error < best)) continue;
    best = error;
    inverse = trial;
  }
  ScaleSums sums;
  for (uint32_t k = 0; k < n; ++k) {
    level[k] = static_cast<uint8_t>(std::min(most, round_even(inverse * x[k])));
    const float l = level[k];
    sums.lx += w[k] * x[k] * l;
    sums.l2 += w[k] * l * l;
  }
  for (int pass = 0; pass < 5 && improve(n, most, x, w, level, &sums); ++pass) {
  }
  return sums.l2 > 0 ? sums.lx / sums.l2 : 0.0f;
}

namespace portable {
void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  any_cpu::fit_affine(in, search, fit);
}
void fit_signed(const FitInput& in, int32_t most, SignedFit* fit) { any_cpu::fit_signed(in, most, fit); }
void fit_stepwise(const FitInput& in, int32_t most, SignedFit* fit) { any_cpu::fit_stepwise(in, most, fit); }
void fit_uneven(const FitInput& in, float* scale) { any_cpu::fit_uneven(in, scale); }
}  // namespace portable

void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  return wide() ? avx2::fit_affine(in, search, fit) : any_cpu::fit_affine(in, search, fit);
}
void fit_signed(const FitInput& in, int32_t most, SignedFit* fit) {
  return wide() ? avx2::fit_signed(in, most, fit) : any_cpu::fit_signed(in, most, fit);
}
void fit_stepwise(const FitInput& in, int32_t most, SignedFit* fit) {
  return wide() ? avx2::fit_stepwise(in, most, fit) : any_cpu::fit_stepwise(in, most, fit);
}
void fit_uneven(const FitInput& in, float* scale) {
  return wide() ? avx2::fit_uneven(in, scale) : any_cpu::fit_uneven(in, scale);
}

}  // namespace smoe
