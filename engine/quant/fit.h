// The searches behind the encoders, up to sixty-four sub-blocks side by side. Private to engine/quant.
//
// A search is a few hundred float32 sums whose order is part of the byte identity, so it cannot be vectorised along the
// values; across sub-blocks it can, and each lane does exactly what the scalar definition does.
#pragma once

#include <cstdint>

namespace smoe {

inline constexpr uint32_t kFitLanes = 64;   // sub-blocks at most; 8, 16, 32 or 64 are used
inline constexpr uint32_t kFitValues = 32;  // a sub-block has 16 or 32

// What is fitted: x[n * s + k] with weight w[n * s + k], sub-block s < subs, k < n; without weights, the root of the
// mean square of the sub-block plus |x|, as in Q4_K and Q5_K.
struct FitInput {
  uint32_t n = 32;
  const float* x = nullptr;
  const float* w = nullptr;
  uint32_t subs = 8;
  bool levels = true;  // false: the scales alone are wanted
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

// scale[s] * level[n * s + k], levels -most..most - 1.
struct SignedFit {
  float scale[kFitLanes];
  int8_t level[kFitLanes * kFitValues];
};

// Whichever this processor has; each gives the same bytes. The unused lanes of a fit are left as they are.
struct Fitter {
  const char* name;
  void (*affine)(const FitInput& in, const AffineSearch& search, AffineFit* fit);
  void (*with_signs)(const FitInput& in, int32_t most, SignedFit* fit);
  // The same for Q3_K without importance weights: levels -4..3, improved one at a time. w is x^2; n is 16.
  void (*stepwise)(const FitInput& in, int32_t most, SignedFit* fit);
  // scale[s] * kLevels[some k], the sixteen uneven levels of IQ4 (uneven.h). Gives the scales alone; n is 32.
  void (*uneven)(const FitInput& in, float* scale);
  // level[k] = clamp(round_even((x[k] + add) / scale), low, high), k < n; n is a multiple of 16.
  void (*round)(const float* x, uint32_t n, float add, float scale, int32_t low, int32_t high, int8_t* level);
  // level[k] = x[k] * inverse to the nearest, halves away from zero, k < n; n is a multiple of 16, levels fit a byte.
  void (*round_away)(const float* x, uint32_t n, float inverse, int8_t* level);
  // The largest magnitude, as the bits of a float: they order as the numbers do, infinities and NaNs above all others.
  uint32_t (*largest)(const float* x, uint64_t n);
  // Sums over (y - x)^2 and over x^2.
  void (*squares)(const float* x, const float* y, uint64_t n, double* difference, double* size);
  // n bf16 numbers, at any address, as floats.
  void (*widen)(const uint8_t* bf16, uint64_t n, float* out);
  // out[k] = scale * level[k] - min, k < n; n is a multiple of 16.
  void (*spread)(const uint8_t* level, uint32_t n, float scale, float min, float* out);
};
const Fitter& fitter();
const Fitter* const* fitters();  // all that this processor can run, ended by null: for the tests

inline void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  fitter().affine(in, search, fit);
}
inline void fit_signed(const FitInput& in, int32_t most, SignedFit* fit) { fitter().with_signs(in, most, fit); }
inline void fit_stepwise(const FitInput& in, int32_t most, SignedFit* fit) { fitter().stepwise(in, most, fit); }
inline void fit_uneven(const FitInput& in, float* scale) { fitter().uneven(in, scale); }

// Quantises up to 16 values that are not negative, by levels 0..most and weights; returns the scale. Scalar: there is
// one such search for a block.
float fit_scales(uint32_t n, int32_t most, const float* x, const float* w, uint8_t* level);

}  // namespace smoe
