// The searches behind the encoders, eight sub-blocks side by side. Private to engine/quant.
//
// A search is a few hundred float32 sums whose order is part of the byte identity, so it cannot be vectorised along the
// values; across sub-blocks it can, and each lane does exactly what the scalar definition does.
#pragma once

#include <cstdint>

namespace smoe {

inline constexpr uint32_t kFitLanes = 8;
inline constexpr uint32_t kFitValues = 32;  // a sub-block has 16 or 32

// What is fitted: x[n * s + k] with weight w[n * s + k], sub-block s < 8, k < n.
struct FitInput {
  uint32_t n = 32;
  const float* x = nullptr;
  const float* w = nullptr;
};

// scale[s] * level[n * s + k] - min[s], levels 0..most, scale >= 0, min >= 0. Tries the inverse scales
// (first + step * t + most) / range, t = 0..tries.
struct AffineSearch {
  int32_t most = 15;
  float first = -1.0f, step = 0.1f;
  int32_t tries = 20;
  bool absolute = false;  // weighs differences by size, not by square
  bool clamped = false;   // clamps before it rounds: what is not a number or out of round_even's reach becomes an end
};
struct AffineFit {
  float scale[kFitLanes], min[kFitLanes];
  uint8_t level[kFitLanes * kFitValues];
};
void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit);

// scale[s] * level[n * s + k], levels -most..most - 1.
struct SignedFit {
  float scale[kFitLanes];
  int8_t level[kFitLanes * kFitValues];
};
void fit_signed(const FitInput& in, int32_t most, SignedFit* fit);

// The same for Q3_K without importance weights: levels -4..3, improved one at a time. w is x^2.
void fit_stepwise(const FitInput& in, int32_t most, SignedFit* fit);

// scale[s] * kLevels[some k], the sixteen uneven levels of IQ4 (uneven.h). Gives the scales alone.
void fit_uneven(const FitInput& in, float* scale);

// Quantises up to 16 values that are not negative, by levels 0..most and weights; returns the scale. Scalar: there is
// one such search for a block.
float fit_scales(uint32_t n, int32_t most, const float* x, const float* w, uint8_t* level);

namespace portable {  // without AVX2, whatever the processor: for the tests
void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit);
void fit_signed(const FitInput& in, int32_t most, SignedFit* fit);
void fit_stepwise(const FitInput& in, int32_t most, SignedFit* fit);
void fit_uneven(const FitInput& in, float* scale);
}  // namespace portable

}  // namespace smoe
