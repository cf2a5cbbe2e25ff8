// The body of fit.cpp, included once for any processor and once more inside an AVX2 target region, each time in a
// namespace of its own. The compiler's vector types: arithmetic, comparison and ?: work lane by lane. No fused
// multiply-adds: the build has -ffp-contract=off.

typedef float V __attribute__((vector_size(32)));
typedef int32_t W __attribute__((vector_size(32)));

// rows[k] holds value k of each of the eight sub-blocks of n values.
template <uint32_t N>
inline void transpose(const float* x, V (&rows)[N]) {
  float lanes[N][kFitLanes];
  for (uint32_t s = 0; s < kFitLanes; ++s) {
    for (uint32_t k = 0; k < N; ++k) lanes[k][s] = x[N * s + k];
  }
  std::memcpy(rows, lanes, sizeof(lanes));
}

template <class T, uint32_t N>
inline void store_levels(const W (&level)[N], T* out) {
  int32_t lanes[N][kFitLanes];
  std::memcpy(lanes, level, sizeof(lanes));
  for (uint32_t s = 0; s < kFitLanes; ++s) {
    for (uint32_t k = 0; k < N; ++k) out[N * s + k] = static_cast<T>(lanes[k][s]);
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

// ---- Q4_K
// ------------------------------------------------------------------------------------------------------------

struct Weighted {  // the values, their weights rms + |x|, and sums over them
  V x[32], w[32], sum_w, sum_wx, low, high;
};

inline void weigh(const float* values, Weighted* in) {
  transpose(values, in->x);
  V sum_x2 = {};
  for (uint32_t k = 0; k < 32; ++k) sum_x2 += in->x[k] * in->x[k];
  const V mean = sum_x2 / 32.0f;
  V rms;
  for (uint32_t s = 0; s < kFitLanes; ++s) rms[s] = std::sqrt(mean[s]);
  in->sum_w = in->sum_wx = V{};
  in->low = in->high = in->x[0];
  for (uint32_t k = 0; k < 32; ++k) {
    const V& x = in->x[k];
    magnitude(x, &in->w[k]);
    in->w[k] = rms + in->w[k];
    in->sum_w += in->w[k];
    in->sum_wx += in->w[k] * x;
    in->low = x < in->low ? x : in->low;
    in->high = x > in->high ? x : in->high;
  }
  in->low = in->low > 0 ? V{} : in->low;
}

inline void weighted_error(const Weighted& in, const W (&level)[32], const V& scale, const V& edge, V* error) {
  *error = V{};
  for (uint32_t k = 0; k < 32; ++k) {
    V l;
    to_float(level[k], &l);
    const V difference = scale * l + edge - in.x[k];
    *error += in.w[k] * (difference * difference);
  }
}

// Weighted least squares for given levels; false lanes of `usable` have no solution.
inline void solve(const Weighted& in, const W (&level)[32], V* scale, V* edge, W* usable) {
  V sum_wl = {}, sum_wl2 = {}, sum_wlx = {};
  for (uint32_t k = 0; k < 32; ++k) {
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

void fit_q4_k(const float* values, Q4KFit* fit) {
  Weighted in;
  weigh(values, &in);
  V low = in.low;
  const V range = in.high - low;
  const W flat = in.high == low;  // one value, zero or below: no levels, only the minimum
  W best_level[32], level[32];
  const V start = 15.0f / range;
  V scale = 1.0f / start, best;
  for (uint32_t k = 0; k < 32; ++k) round_level(start * (in.x[k] - low), 0, 15, &best_level[k]);
  weighted_error(in, best_level, scale, low, &best);
  for (int t = 0; t <= 20; ++t) {
    // The range is the current one: a better fit moves its lower edge.
    const V inverse = (-1.0f + 0.1f * static_cast<float>(t) + 15.0f) / (in.high - low);
    for (uint32_t k = 0; k < 32; ++k) round_level(inverse * (in.x[k] - low), 0, 15, &level[k]);
    V trial_scale, edge, error;
    W usable;
    solve(in, level, &trial_scale, &edge, &usable);
    weighted_error(in, level, trial_scale, edge, &error);
    const W better = usable & (error < best);
    best = better ? error : best;
    scale = better ? trial_scale : scale;
    low = better ? edge : low;
    for (uint32_t k = 0; k < 32; ++k) best_level[k] = better ? level[k] : best_level[k];
  }
  for (uint32_t k = 0; k < 32; ++k) best_level[k] = flat ? W{} : best_level[k];
  scale = flat ? V{} : scale;
  const V min = flat ? -in.low : -low;
  store_levels(best_level, fit->level);
  std::memcpy(fit->scale, &scale, sizeof(scale));
  std::memcpy(fit->min, &min, sizeof(min));
}

// ---- Q6_K
// ------------------------------------------------------------------------------------------------------------

struct Sums {  // over x^2 x l and x^2 l^2
  V lx, l2;
};

inline void sums_of(const V (&x)[16], const V& inverse, W (&level)[16], Sums* sums) {
  sums->lx = sums->l2 = V{};
  for (uint32_t k = 0; k < 16; ++k) {
    round_level(inverse * x[k], -32, 31, &level[k]);
    V l;
    to_float(level[k], &l);
    const V w = x[k] * x[k];
    sums->lx += w * x[k] * l;
    sums->l2 += w * l * l;
  }
}

void fit_q6_k(const float* values, Q6KFit* fit) {
  constexpr float kTiny = 1e-15f;  // below this a sub-block counts as zero
  V x[16], largest = {}, extreme = {};
  transpose(values, x);
  for (uint32_t k = 0; k < 16; ++k) {
    V size;
    magnitude(x[k], &size);
    const W more = size > largest;
    largest = more ? size : largest;
    extreme = more ? x[k] : extreme;
  }
  const W empty = largest < kTiny;
  W best_level[16], level[16];
  Sums sums;
  sums_of(x, -32.0f / extreme, best_level, &sums);
  V scale = sums.l2 != 0 ? sums.lx / sums.l2 : V{};
  V best = scale * sums.lx;
  for (int t = -9; t <= 9; ++t) {
    if (t == 0) continue;
    sums_of(x, -(32.0f + 0.1f * static_cast<float>(t)) / extreme, level, &sums);
    const W better = (sums.l2 > 0) & (sums.lx * sums.lx > best * sums.l2);
    scale = better ? sums.lx / sums.l2 : scale;
    best = better ? scale * sums.lx : best;
    for (uint32_t k = 0; k < 16; ++k) best_level[k] = better ? level[k] : best_level[k];
  }
  for (uint32_t k = 0; k < 16; ++k) best_level[k] = empty ? W{} - 32 : best_level[k];
  scale = empty ? V{} : scale;
  store_levels(best_level, fit->level);
  std::memcpy(fit->scale, &scale, sizeof(scale));
}
