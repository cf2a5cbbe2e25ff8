// The body of fit.cpp, included once for any processor and once more inside an AVX2 target region, each time in a
// namespace of its own. The compiler's vector types: arithmetic, comparison and ?: work lane by lane. No fused
// multiply-adds: the build has -ffp-contract=off.

typedef float V __attribute__((vector_size(32)));
typedef int32_t W __attribute__((vector_size(32)));

// rows[k] holds value k of each of the eight sub-blocks of n values.
template <int N>
inline void transpose(const float* x, V (&rows)[N]) {
  float lanes[N][kFitLanes];
  for (uint32_t s = 0; s < kFitLanes; ++s) {
    for (int k = 0; k < N; ++k) lanes[k][s] = x[static_cast<uint32_t>(N) * s + static_cast<uint32_t>(k)];
  }
  std::memcpy(rows, lanes, sizeof(lanes));
}

template <class T, int N>
inline void store_levels(const W (&level)[N], T* out) {
  int32_t lanes[N][kFitLanes];
  std::memcpy(lanes, level, sizeof(lanes));
  for (uint32_t s = 0; s < kFitLanes; ++s) {
    for (int k = 0; k < N; ++k)
      out[static_cast<uint32_t>(N) * s + static_cast<uint32_t>(k)] = static_cast<T>(lanes[k][s]);
  }
}

// round_even and a clamp, see codec.h
inline void round_level(const V& x, int32_t low, int32_t high, W* level) {
  const V shifted = x + 12582912.0f;
  W bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const W rounded = (bits & 0x7fffff) - 0x400000;
  const W raised = rounded < low ? W{} + low : rounded;
  *level = raised > high ? W{} + high : raised;
}

inline void to_float(const W& level, V* out) { *out = __builtin_convertvector(level, V); }
inline void magnitude(const V& x, V* out) { *out = x < 0 ? -x : x; }
inline bool any(const W& mask) {
  int32_t lanes[kFitLanes], all = 0;
  std::memcpy(lanes, &mask, sizeof(lanes));
  for (const int32_t lane : lanes) all |= lane;
  return all != 0;
}

template <int N>
struct Values {  // the values and their weights
  V x[N], w[N];
  explicit Values(const FitInput& in) {
    transpose(in.x, x);
    transpose(in.w, w);
  }
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

// ---- levels with a minimum ----

template <int N>
struct Weighted : Values<N> {  // and sums over them
  V sum_w = {}, sum_wx = {}, low, high;
  explicit Weighted(const FitInput& in) : Values<N>(in) {
    low = high = this->x[0];
    for (int k = 0; k < N; ++k) {
      const V& x = this->x[k];
      sum_w += this->w[k];
      sum_wx += this->w[k] * x;
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    low = low > 0 ? V{} : low;
  }
};

template <int N>
inline void weighted_error(const Weighted<N>& in, const W (&level)[N], const V& scale, const V& edge, bool absolute,
                           V* error) {
  *error = V{};
  for (int k = 0; k < N; ++k) {
    V l, size;
    to_float(level[k], &l);
    const V difference = scale * l + edge - in.x[k];
    magnitude(difference, &size);
    *error += in.w[k] * (absolute ? size : difference * difference);
  }
}

// Weighted least squares for given levels; false lanes of `usable` have no solution.
template <int N>
inline void solve(const Weighted<N>& in, const W (&level)[N], V* scale, V* edge, W* usable) {
  V sum_wl = {}, sum_wl2 = {}, sum_wlx = {};
  for (int k = 0; k < N; ++k) {
    V l;
    to_float(level[k], &l);
    const V wl = in.w[k] * l;
    sum_wl += wl;
    sum_wl2 += wl * l;
    sum_wlx += wl * in.x[k];
  }
  const V determinant = in.sum_w * sum_wl2 - sum_wl * sum_wl;
  *usable = determinant > 0;
  *scale = (in.sum_w * sum_wlx - in.sum_wx * sum_wl) / determinant;
  *edge = (sum_wl2 * in.sum_wx - sum_wl * sum_wlx) / determinant;
  const W positive = *edge > 0;
  *scale = positive ? sum_wlx / sum_wl2 : *scale;
  *edge = positive ? V{} : *edge;
}

template <int N>
void affine(const FitInput& input, const AffineSearch& search, AffineFit* fit) {
  const Weighted<N> in(input);
  const float most = static_cast<float>(search.most);
  V low = in.low;
  const W flat = in.high == low;  // one value, zero or below: no levels, only the minimum
  W best_level[N], level[N];
  const V start = most / (in.high - low);
  V scale = 1.0f / start, best;
  for (int k = 0; k < N; ++k) round_level(start * (in.x[k] - low), 0, search.most, &best_level[k]);
  weighted_error(in, best_level, scale, low, search.absolute, &best);
  for (int t = 0; t <= search.tries; ++t) {
    // The range is the current one: a better fit moves its lower edge.
    const V inverse = (search.first + search.step * static_cast<float>(t) + most) / (in.high - low);
    for (int k = 0; k < N; ++k) {
      V place = inverse * (in.x[k] - low);
      if (search.clamped) place = place > 0 ? (place < most ? place : V{} + most) : V{};
      round_level(place, 0, search.most, &level[k]);
    }
    V trial_scale, edge, error;
    W usable;
    solve(in, level, &trial_scale, &edge, &usable);
    weighted_error(in, level, trial_scale, edge, search.absolute, &error);
    const W better = usable & (error < best);
    best = better ? error : best;
    scale = better ? trial_scale : scale;
    low = better ? edge : low;
    for (int k = 0; k < N; ++k) best_level[k] = better ? level[k] : best_level[k];
  }
  for (int k = 0; k < N; ++k) best_level[k] = flat ? W{} : best_level[k];
  scale = flat ? V{} : scale;
  const V min = flat ? -in.low : -low;
  store_levels(best_level, fit->level);
  std::memcpy(fit->scale, &scale, sizeof(scale));
  std::memcpy(fit->min, &min, sizeof(min));
}

void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  return in.n == 16 ? affine<16>(in, search, fit) : affine<32>(in, search, fit);
}

// ---- signed levels ----

constexpr float kTiny = 1e-15f;  // below this a sub-block counts as zero

struct Sums {  // over w x l and w l^2
  V lx, l2;
};

template <int N>
inline void sums_of(const Values<N>& in, const V& inverse, int32_t most, W (&level)[N], Sums* sums) {
  sums->lx = sums->l2 = V{};
  for (int k = 0; k < N; ++k) {
    round_level(inverse * in.x[k], -most, most - 1, &level[k]);
    V l;
    to_float(level[k], &l);
    sums->lx += in.w[k] * in.x[k] * l;
    sums->l2 += in.w[k] * l * l;
  }
}

template <int N>
void store(const V& largest, int32_t most, W (&level)[N], V scale, SignedFit* fit) {
  const W empty = largest < kTiny;
  for (int k = 0; k < N; ++k) level[k] = empty ? W{} - most : level[k];
  scale = empty ? V{} : scale;
  store_levels(level, fit->level);
  std::memcpy(fit->scale, &scale, sizeof(scale));
}

template <int N>
void signed_levels(const FitInput& input, int32_t most, SignedFit* fit) {
  const Values<N> in(input);
  V largest, extreme;
  extreme_of(in.x, &largest, &extreme);
  W best_level[N], level[N];
  Sums sums;
  sums_of(in, -static_cast<float>(most) / extreme, most, best_level, &sums);
  V scale = sums.l2 != 0 ? sums.lx / sums.l2 : V{};
  V best = scale * sums.lx;
  for (int t = -9; t <= 9; ++t) {
    if (t == 0) continue;
    sums_of(in, -(static_cast<float>(most) + 0.1f * static_cast<float>(t)) / extreme, most, level, &sums);
    const W better = (sums.l2 > 0) & (sums.lx * sums.lx > best * sums.l2);
    scale = better ? sums.lx / sums.l2 : scale;
    best = better ? scale * sums.lx : best;
    for (int k = 0; k < N; ++k) best_level[k] = better ? level[k] : best_level[k];
  }
  store(largest, most, best_level, scale, fit);
}

void fit_signed(const FitInput& in, int32_t most, SignedFit* fit) {
  return in.n == 16 ? signed_levels<16>(in, most, fit) : signed_levels<32>(in, most, fit);
}

// One pass over the levels: each is moved to where the others' scale puts it if that improves the fit.
inline bool improve(const Values<16>& in, int32_t most, W (&level)[16], Sums* sums) {
  W changed = {};
  for (int k = 0; k < 16; ++k) {
    V l, next;
    to_float(level[k], &l);
    V lx = sums->lx - in.w[k] * in.x[k] * l, l2 = sums->l2 - in.w[k] * l * l;
    W moved;
    round_level(in.x[k] * l2 / lx, -most, most - 1, &moved);
    to_float(moved, &next);
    const W tried = (lx > 0) & (moved != level[k]);
    lx += in.w[k] * in.x[k] * next;
    l2 += in.w[k] * next * next;
    const W better = tried & (l2 > 0) & (lx * lx * sums->l2 > sums->lx * sums->lx * l2);
    level[k] = better ? moved : level[k];
    sums->lx = better ? lx : sums->lx;
    sums->l2 = better ? l2 : sums->l2;
    changed |= better;
  }
  return any(changed);
}

void fit_stepwise(const FitInput& input, int32_t most, SignedFit* fit) {
  const Values<16> in(input);
  V largest, extreme;
  extreme_of(in.x, &largest, &extreme);
  W level[16];
  Sums sums;
  sums_of(in, -static_cast<float>(most) / extreme, most, level, &sums);
  for (int pass = 0; pass < 5 && improve(in, most, level, &sums); ++pass) {
  }
  store(largest, most, level, sums.l2 > 0 ? sums.lx / sums.l2 : V{}, fit);
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
  const Values<32> in(input);
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
  std::memcpy(out, &scale, sizeof(scale));
}
