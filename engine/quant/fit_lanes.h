// The body of fit.cpp, included once for any processor and again inside an AVX2 and an AVX-512 target region, each time
// in a namespace of its own, with SMOE_FIT_LANES sub-blocks to a vector. Arithmetic, comparison
// and ?: work lane by lane. No fused multiply-adds: the build has -ffp-contract=off.

#include "quant/lanes.h"

// The part of the input whose first sub-block is s.
inline FitInput from(const FitInput& in, uint32_t s) {
  return {in.n, in.x + in.n * s, in.w == nullptr ? nullptr : in.w + in.n * s, kLanes, in.levels};
}

// The values and weights of G groups of sub-blocks, whose sums of squares wait for themselves side by side.
template <int N, int G, class Group>
inline void load_groups(const FitInput& in, Group* out) {
  for (int g = 0; g < G; ++g) {
    const FitInput part = from(in, kLanes * static_cast<uint32_t>(g));
    transpose(part.x, out[g].x);
    if (part.w != nullptr) transpose(part.w, out[g].w);
  }
  if (in.w != nullptr) return;
  V mean[G] = {};
  for (int k = 0; k < N; ++k) {
    for (int g = 0; g < G; ++g) mean[g] += out[g].x[k] * out[g].x[k];
  }
  for (int g = 0; g < G; ++g) {
    mean[g] /= static_cast<float>(N);
    square_root(&mean[g]);
    for (int k = 0; k < N; ++k) {
      magnitude(out[g].x[k], &out[g].w[k]);
      out[g].w[k] += mean[g];
    }
  }
}

template <int N>
struct Values {  // the values and their weights
  V x[N], w[N];
  void load(const FitInput& in) { load_groups<N, 1>(in, this); }
};

// Largest magnitude and the first value that has it.
template <int N>
inline void extreme_of(const V (&x)[N], V* largest, V* extreme) {
  *largest = *extreme = V{};
  for (int k = 0; k < N; ++k) {
    V size;
    magnitude(x[k], &size);
    const W more = size > *largest;
    *largest = more ? size : *largest;
    *extreme = more ? x[k] : *extreme;
  }
}

#include "quant/fit_affine.h"

// ---- signed levels ----

constexpr float kTiny = 1e-15f;  // below this a sub-block counts as zero

struct Sums {  // over w x l and w l^2
  V lx, l2;
};

template <int N>
inline void signed_at(const Values<N>& in, const V& inverse, int32_t most, V (&level)[N]) {
  for (int k = 0; k < N; ++k) {
    W rounded;
    round_level(inverse * in.x[k], -most, most - 1, &rounded);
    to_float(rounded, &level[k]);
  }
}

template <int N>
struct Signed : Values<N> {  // and products that every try needs
  V wx[N], low, high;
  void load(const FitInput& in) {
    Values<N>::load(in);
    low = high = this->x[0];
    for (int k = 0; k < N; ++k) {
      const V& x = this->x[k];
      wx[k] = this->w[k] * x;
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
  }
};

template <int N, bool Clamp>
inline void sums_near(const Signed<N>& in, const V& inverse, float end, Sums* out) {
  Sums sums = {};
  for (int k = 0; k < N; ++k) {
    V level;
    round_near<Clamp, Clamp>(inverse * in.x[k], -end, end - 1, &level);
    sums.lx += in.wx[k] * level;
    sums.l2 += in.w[k] * level * level;
  }
  *out = sums;
}

template <int N>
inline void sums_at(const Signed<N>& in, const V& inverse, int32_t most, Sums* sums) {
  const float end = static_cast<float>(most);
  const V a = inverse * in.low, b = inverse * in.high;
  const V first = a < b ? a : b, last = a < b ? b : a;
  if (all((first > -end - 0.5f) & (last < end - 0.5f))) return sums_near<N, false>(in, inverse, end, sums);
  if (within_reach(a, b)) return sums_near<N, true>(in, inverse, end, sums);
  V level[N];
  signed_at(in, inverse, most, level);
  *sums = Sums{};
  for (int k = 0; k < N; ++k) {
    sums->lx += in.wx[k] * level[k];
    sums->l2 += in.w[k] * level[k] * level[k];
  }
}

template <int N>
void store(const V& largest, int32_t most, V (&level)[N], V scale, bool levels, uint32_t first, SignedFit* fit) {
  const W empty = largest < kTiny;
  scale = empty ? V{} : scale;
  std::memcpy(fit->scale + first, &scale, sizeof(scale));
  if (!levels) return;
  for (int k = 0; k < N; ++k) level[k] = empty ? V{} - static_cast<float>(most) : level[k];
  store_levels(level, fit->level + static_cast<uint32_t>(N) * first);
}

template <int N>
void signed_levels(const FitInput& input, int32_t most, uint32_t first, SignedFit* fit) {
  Signed<N> in;
  in.load(from(input, first));
  V largest, extreme;
  extreme_of(in.x, &largest, &extreme);
  Sums sums;
  V best_inverse = -static_cast<float>(most) / extreme;
  sums_at(in, best_inverse, most, &sums);
  V scale = sums.l2 != 0 ? sums.lx / sums.l2 : V{};
  V best = scale * sums.lx;
  for (int t = -9; t <= 9; ++t) {
    if (t == 0) continue;
    const V inverse = -(static_cast<float>(most) + 0.1f * static_cast<float>(t)) / extreme;
    sums_at(in, inverse, most, &sums);
    const W better = (sums.l2 > 0) & (sums.lx * sums.lx > best * sums.l2);
    scale = better ? sums.lx / sums.l2 : scale;
    best = better ? scale * sums.lx : best;
    best_inverse = better ? inverse : best_inverse;
  }
  V level[N];
  if (input.levels) signed_at(in, best_inverse, most, level);
  store(largest, most, level, scale, input.levels, first, fit);
}

void fit_signed(const FitInput& in, int32_t most, SignedFit* fit) {
  for (uint32_t s = 0; s < in.subs; s += kLanes) {
    in.n == 16 ? signed_levels<16>(in, most, s, fit) : signed_levels<32>(in, most, s, fit);
  }
}

// One pass over the levels: each is moved to where the others' scale puts it if that improves the fit.
inline bool improve(const Values<16>& in, int32_t most, V (&level)[16], Sums* sums) {
  W changed = {};
  for (int k = 0; k < 16; ++k) {
    const V& l = level[k];
    V next;
    V lx = sums->lx - in.w[k] * in.x[k] * l, l2 = sums->l2 - in.w[k] * l * l;
    W moved;
    round_level(in.x[k] * l2 / lx, -most, most - 1, &moved);
    to_float(moved, &next);
    const W tried = (lx > 0) & (next != l);
    lx += in.w[k] * in.x[k] * next;
    l2 += in.w[k] * next * next;
    const W better = tried & (l2 > 0) & (lx * lx * sums->l2 > sums->lx * sums->lx * l2);
    level[k] = better ? next : level[k];
    sums->lx = better ? lx : sums->lx;
    sums->l2 = better ? l2 : sums->l2;
    changed |= better;
  }
  return any(changed);
}

void fit_stepwise(const FitInput& input, int32_t most, SignedFit* fit) {
  for (uint32_t s = 0; s < input.subs; s += kLanes) {
    Values<16> in;
    in.load(from(input, s));
    V largest, extreme;
    extreme_of(in.x, &largest, &extreme);
    V level[16];
    Sums sums = {};
    signed_at(in, -static_cast<float>(most) / extreme, most, level);
    for (int k = 0; k < 16; ++k) {
      sums.lx += in.w[k] * in.x[k] * level[k];
      sums.l2 += in.w[k] * level[k] * level[k];
    }
    for (int pass = 0; pass < 5 && improve(in, most, level, &sums); ++pass) {
    }
    store(largest, most, level, sums.l2 > 0 ? sums.lx / sums.l2 : V{}, true, s, fit);
  }
}

// ---- uneven levels ----

// The value of the nearest level (nearest_uneven).
inline void round_uneven(const V& x, V* value) {
  const V twice = x + x;
  V sum = V{} + static_cast<float>(kUneven[0]);
  for (int j = 1; j < 16; ++j) {
    const float edge = static_cast<float>(kUneven[j - 1] + kUneven[j]);
    const float step = static_cast<float>(kUneven[j] - kUneven[j - 1]);
    sum += twice >= edge ? V{} + step : V{};
  }
  *value = sum;
}

inline void uneven_sums(const Values<32>& in, const V& inverse, Sums* sums) {
  sums->lx = sums->l2 = V{};
  for (int k = 0; k < 32; ++k) {
    V q;
    round_uneven(inverse * in.x[k], &q);
    sums->lx += in.w[k] * q * in.x[k];
    sums->l2 += in.w[k] * q * q;
  }
}

void fit_uneven(const FitInput& input, float* out) {
  constexpr int kTries = 7;
  for (uint32_t s = 0; s < input.subs; s += kLanes) {
    Values<32> in;
    in.load(from(input, s));
    V largest, extreme;
    extreme_of(in.x, &largest, &extreme);
    Sums sums;
    uneven_sums(in, 1.0f / (-extreme / static_cast<float>(kUneven[0])), &sums);
    V scale = sums.l2 > 0 ? sums.lx / sums.l2 : V{};
    V best = scale * sums.lx;
    for (int t = -kTries; t <= kTries; ++t) {
      uneven_sums(in, static_cast<float>(t + kUneven[0]) / extreme, &sums);
      const W better = (sums.l2 > 0) & (sums.lx * sums.lx > best * sums.l2);
      scale = better ? sums.lx / sums.l2 : scale;
      best = better ? scale * sums.lx : best;
    }
    scale = largest < kTiny ? V{} : scale;
    std::memcpy(out + s, &scale, sizeof(scale));
  }
}

// ---- levels of known scales, and sums ----

inline void store_bytes(const W& rounded, int8_t* out) {
  const B bytes = __builtin_convertvector(rounded, B);
  std::memcpy(out, &bytes, sizeof(bytes));
}

void round_to(const float* x, uint32_t n, float add, float scale, int32_t low, int32_t high, int8_t* level) {
  for (uint32_t k = 0; k < n; k += kLanes) {
    V values;
    W rounded;
    std::memcpy(&values, x + k, sizeof(values));
    round_level((values + add) / scale, low, high, &rounded);
    store_bytes(rounded, level + k);
  }
}

void round_away(const float* x, uint32_t n, float inverse, int8_t* level) {
  for (uint32_t k = 0; k < n; k += kLanes) {
    V values, floor;
    std::memcpy(&values, x + k, sizeof(values));
    values *= inverse;
    const W whole = __builtin_convertvector(values, W);
    to_float(whole, &floor);
    const V rest = values - floor;
    store_bytes(whole - (rest >= 0.5f) + (rest <= -0.5f), level + k);
  }
}

uint32_t largest(const float* x, uint64_t n) {
  W most = {};
  uint64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    W bits;
    std::memcpy(&bits, x + k, sizeof(bits));
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t lanes[kLanes], found = 0;
  std::memcpy(lanes, &most, sizeof(lanes));
  for (const int32_t lane : lanes) found = std::max(found, lane);
  for (; k < n; ++k) found = std::max(found, std::bit_cast<int32_t>(x[k]) & 0x7fffffff);
  return static_cast<uint32_t>(found);
}

// Loops that the compiler widens better than it converts vectors.
void widen(const uint8_t* bf16, uint64_t n, float* out) {
  for (uint64_t k = 0; k < n; ++k) {
    uint16_t half;
    std::memcpy(&half, bf16 + 2 * k, sizeof(half));
    out[k] = std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
  }
}

void spread(const uint8_t* level, uint32_t n, float scale, float min, float* out) {
  for (uint32_t k = 0; k < n; ++k) out[k] = scale * static_cast<float>(level[k]) - min;
}

// Sixteen float sums side by side on every processor, so that all find the same.
void squares(const float* x, const float* y, uint64_t n, double* difference, double* size) {
  constexpr uint32_t kParts = 16 / kLanes;
  V apart[kParts] = {}, own[kParts] = {};
  uint64_t k = 0;
  for (; k + 16 <= n; k += 16) {
    for (uint32_t p = 0; p < kParts; ++p) {
      V a, b;
      std::memcpy(&a, x + k + kLanes * p, sizeof(a));
      std::memcpy(&b, y + k + kLanes * p, sizeof(b));
      own[p] += a * a;
      apart[p] += (b - a) * (b - a);
    }
  }
  float lanes[2][16];
  std::memcpy(lanes[0], apart, sizeof(apart));
  std::memcpy(lanes[1], own, sizeof(own));
  *difference = *size = 0;
  for (uint32_t lane = 0; lane < 16; ++lane) {
    *difference += static_cast<double>(lanes[0][lane]);
    *size += static_cast<double>(lanes[1][lane]);
  }
  for (; k < n; ++k) {
    const double a = static_cast<double>(x[k]), b = static_cast<double>(y[k]);
    *difference += (b - a) * (b - a);
    *size += a * a;
  }
}

constexpr Fitter table(const char* name) {
  return {name,       fit_affine, fit_signed, fit_stepwise, fit_uneven, round_to,
          round_away, largest,    squares,    widen,        spread};
}
