#include "quant/fit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/codec.h"
#include "quant/uneven.h"
#include "util/cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace smoe {
namespace {

#define SMOE_FIT_LANES 8
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

#undef SMOE_FIT_LANES
#define SMOE_FIT_LANES 16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#include "quant/fit_lanes.h"
}  // namespace avx512
#pragma GCC pop_options

// Sixteen lanes where there are sixteen sub-blocks, eight otherwise.
template <auto Wide, auto Narrow, class... Rest>
void by_width(const FitInput& in, Rest... rest) {
  in.subs % avx512::kLanes == 0 ? Wide(in, rest...) : Narrow(in, rest...);
}

constexpr Fitter kAvx2 = avx2::table("avx2");
constexpr Fitter kAvx512 = {
    "avx512",
    by_width<avx512::fit_affine, avx2::fit_affine, const AffineSearch&, AffineFit*>,
    by_width<avx512::fit_signed, avx2::fit_signed, int32_t, SignedFit*>,
    by_width<avx512::fit_stepwise, avx2::fit_stepwise, int32_t, SignedFit*>,
    by_width<avx512::fit_uneven, avx2::fit_uneven, float*>,
    avx512::round_to,
    avx512::round_away,
    avx512::largest,
    avx512::squares,
    avx512::widen,
    avx512::spread,
};
#endif
constexpr Fitter kPortable = any_cpu::table("portable");

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

const Fitter* const* fitters() {
  static const Fitter* const* const list = [] {
    static const Fitter* found[4] = {};
    size_t count = 0;
    found[count++] = &kPortable;
#if defined(__x86_64__)
    if (cpu_features().avx2) found[count++] = &kAvx2;
    if (cpu_features().avx512) found[count++] = &kAvx512;
#endif
    return found;
  }();
  return list;
}

const Fitter& fitter() {
  static const Fitter* const last = [] {
    const Fitter* const* at = fitters();
    while (at[1] != nullptr) ++at;
    return *at;
  }();
  return *last;
}

}  // namespace smoe
