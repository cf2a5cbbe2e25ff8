// The searches behind the K encoders, eight sub-blocks side by side. Private to engine/quant.
//
// A search is a few hundred float32 sums whose order is part of the byte identity, so it cannot be vectorised along the
// values; across sub-blocks it can, and each lane does exactly what the scalar definition does.
#pragma once

#include <cstdint>

namespace smoe {

inline constexpr uint32_t kFitLanes = 8;

// Q4_K: x[32 * s + k] is fitted by scale[s] * level[32 * s + k] - min[s], s < 8, levels 0..15.
struct Q4KFit {
  float scale[kFitLanes], min[kFitLanes];
  uint8_t level[kFitLanes * 32];
};
void fit_q4_k(const float* x, Q4KFit* fit);

// Q6_K: x[16 * s + k] is fitted by scale[s] * level[16 * s + k], s < 8, levels -32..31.
struct Q6KFit {
  float scale[kFitLanes];
  int8_t level[kFitLanes * 16];
};
void fit_q6_k(const float* x, Q6KFit* fit);

namespace portable {  // without AVX2, whatever the processor: for the tests
void fit_q4_k(const float* x, Q4KFit* fit);
void fit_q6_k(const float* x, Q6KFit* fit);
}  // namespace portable

}  // namespace smoe
