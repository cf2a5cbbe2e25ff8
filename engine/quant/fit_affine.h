// Part of fit_lanes.h: levels with a minimum, scale * level - min.

template <int N>
struct Weighted : Values<N> {  // and sums over them
  V sum_w, sum_wx, low, high, lowest;
  void load(const FitInput& in) {
    Values<N>::load(in);
    sum_w = sum_wx = V{};
    low = high = this->x[0];
    for (int k = 0; k < N; ++k) {
      const V& x = this->x[k];
      sum_w += this->w[k];
      sum_wx += this->w[k] * x;
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    lowest = low;
    low = low > 0 ? V{} : low;
  }
};

template <int N>
inline void levels_at(const Weighted<N>& in, const AffineSearch& search, const V& inverse, const V& low, bool clamped,
                      V (&level)[N]) {
  const float most = static_cast<float>(search.most);
  for (int k = 0; k < N; ++k) {
    V place = inverse * (in.x[k] - low);
    W rounded;
    if (clamped) place = place > 0 ? (place < most ? place : V{} + most) : V{};
    round_level(place, 0, search.most, &rounded);
    to_float(rounded, &level[k]);
  }
}

// One try: what was found so far, and the sums over the levels of the next inverse.
template <int N>
struct Try {
  V low, scale, best, best_inverse, best_low;
  V level[N];
  W tried = {};  // lanes whose best inverse is not the start's, which is not clamped before it is rounded
  V inverse, trial_scale, edge, error;
};

struct LevelSums {
  V wl, wl2, wlx;
  inline void add(const V& level, const V& x, const V& w) {
    const V weighted = w * level;
    wl += weighted;
    wl2 += weighted * level;
    wlx += weighted * x;
  }
};

template <int N, int G, bool Low, bool High>
inline void sum_near(const Weighted<N>* in, const AffineSearch& search, Try<N>* at, LevelSums* sums) {
  const float most = static_cast<float>(search.most);
  LevelSums found[G] = {};
  V turned[G], low[G];
  for (int g = 0; g < G; ++g) {
    turned[g] = -at[g].inverse;
    low[g] = at[g].low;
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    for (int g = 0; g < G; ++g) {
      round_near<Low, High>(turned[g] * (low[g] - in[g].x[k]), 0.0f, most, &at[g].level[k]);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    for (int g = 0; g < G; ++g) found[g].add(at[g].level[k], in[g].x[k], in[g].w[k]);
  }
  for (int g = 0; g < G; ++g) sums[g] = found[g];
}

// The levels of G groups of sub-blocks side by side, so that the sums of one fill the latency of the other's. The
// places of all values lie between those of the lowest and the highest, which say what need not be clamped.
template <int N, int G>
inline void sum_levels(const Weighted<N>* in, const AffineSearch& search, Try<N>* at, LevelSums* sums) {
  const float end = static_cast<float>(search.most) + 0.5f;
  W within = ~W{}, above = ~W{}, near = ~W{};
  V first[G], last[G];
  for (int g = 0; g < G; ++g) {
    first[g] = at[g].inverse * (in[g].lowest - at[g].low);
    last[g] = at[g].inverse * (in[g].high - at[g].low);
    within &= (first[g] >= -0.5f) & (last[g] < end);
  }
  if (all(within)) return sum_near<N, G, false, false>(in, search, at, sums);
  for (int g = 0; g < G; ++g) {
    above &= (first[g] >= -0.5f) & (last[g] < kReach);
    near &= (first[g] > -kReach) & (first[g] < kReach) & (last[g] > -kReach) & (last[g] < kReach);
  }
  if (all(above)) return sum_near<N, G, false, true>(in, search, at, sums);
  if (all(near)) return sum_near<N, G, true, true>(in, search, at, sums);
  for (int g = 0; g < G; ++g) {
    levels_at(in[g], search, at[g].inverse, at[g].low, search.clamped, at[g].level);
    sums[g] = LevelSums{};
    for (int k = 0; k < N; ++k) sums[g].add(at[g].level[k], in[g].x[k], in[g].w[k]);
  }
}

// Weighted least squares for given levels; lanes that have no solution get no number, and so no better error.
template <int N>
inline void solve(const Weighted<N>& in, const LevelSums& sums, Try<N>* at) {
  const V determinant = in.sum_w * sums.wl2 - sums.wl * sums.wl;
  const V over = determinant > 0 ? determinant : V{} + std::numeric_limits<float>::quiet_NaN();
  const V edge = (sums.wl2 * in.sum_wx - sums.wl * sums.wlx) / over;
  at->trial_scale = (in.sum_w * sums.wlx - in.sum_wx * sums.wl) / over;
  at->edge = edge;
  const W positive = edge > 0;
  if (!any(positive)) return;
  at->trial_scale = positive ? sums.wlx / sums.wl2 : at->trial_scale;
  at->edge = positive ? V{} : edge;
}

template <int N, int G, bool Absolute>
inline void weighted_errors(const Weighted<N>* in, Try<N>* at) {
  V sum[G] = {}, scale[G], edge[G];
  for (int g = 0; g < G; ++g) {
    scale[g] = at[g].trial_scale;
    edge[g] = at[g].edge;
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    for (int g = 0; g < G; ++g) {
      V size;
      const V difference = scale[g] * at[g].level[k] + edge[g] - in[g].x[k];
      magnitude(difference, &size);
      sum[g] += in[g].w[k] * (Absolute ? size : difference * difference);
    }
  }
  for (int g = 0; g < G; ++g) at[g].error = sum[g];
}

template <int N>
inline void start(const Weighted<N>& in, const AffineSearch& search, Try<N>* at) {
  at->low = at->best_low = at->edge = in.low;
  at->best_inverse = static_cast<float>(search.most) / (in.high - in.low);
  at->scale = at->trial_scale = 1.0f / at->best_inverse;
  levels_at(in, search, at->best_inverse, in.low, false, at->level);
}

template <int N>
inline void keep_better(Try<N>* at) {
  const W better = at->error < at->best;
  at->best = better ? at->error : at->best;
  at->scale = better ? at->trial_scale : at->scale;
  at->best_inverse = better ? at->inverse : at->best_inverse;
  at->best_low = better ? at->low : at->best_low;
  at->tried |= better;
  at->low = better ? at->edge : at->low;
}

template <int N>
inline void store(const Weighted<N>& in, const AffineSearch& search, bool levels, uint32_t first, Try<N>* at,
                  AffineFit* fit) {
  const W flat = in.high == in.low;  // one value, zero or below: no levels, only the minimum
  if (levels) {
    V unclamped[N];
    levels_at(in, search, at->best_inverse, at->best_low, search.clamped, at->level);
    levels_at(in, search, at->best_inverse, at->best_low, false, unclamped);
    for (int k = 0; k < N; ++k) at->level[k] = flat ? V{} : at->tried ? at->level[k] : unclamped[k];
    store_levels(at->level, fit->level + static_cast<uint32_t>(N) * first);
  }
  const V scale = flat ? V{} : at->scale, min = flat ? -in.low : -at->low;
  std::memcpy(fit->scale + first, &scale, sizeof(scale));
  std::memcpy(fit->min + first, &min, sizeof(min));
}

// A try has two halves: levels with the scale and edge that fit them best, and whether those err less.
template <int N, int G>
inline void propose(const Weighted<N>* in, const AffineSearch& search, int t, Try<N>* at) {
  // The range is the current one: a better fit moves its lower edge.
  const float wanted = search.first + search.step * static_cast<float>(t) + static_cast<float>(search.most);
  for (int g = 0; g < G; ++g) at[g].inverse = wanted / (in[g].high - at[g].low);
  LevelSums sums[G];
  sum_levels<N, G>(in, search, at, sums);
  for (int g = 0; g < G; ++g) solve(in[g], sums[g], &at[g]);
}

template <int N, int G, bool Absolute>
inline void decide(const Weighted<N>* in, Try<N>* at) {
  weighted_errors<N, G, Absolute>(in, at);
  for (int g = 0; g < G; ++g) keep_better(&at[g]);
}

// Of two sets of G groups one computes while the other waits for its sums, quotients and comparisons.
template <int N, int G, int Sets, bool Absolute>
void affine(const FitInput& input, const AffineSearch& search, uint32_t first, AffineFit* fit) {
  Weighted<N> in[Sets * G];
  Try<N> at[Sets * G];
  for (uint32_t g = 0; g < Sets * G; ++g) {
    in[g].load(from(input, first + kLanes * g));
    start(in[g], search, &at[g]);
  }
  for (int set = 0; set < Sets; ++set) weighted_errors<N, G, Absolute>(in + G * set, at + G * set);
  for (int g = 0; g < Sets * G; ++g) at[g].best = at[g].error;
  propose<N, G>(in, search, 0, at);
  for (int t = 0; t <= search.tries; ++t) {
    if (Sets == 2) propose<N, G>(in + (Sets - 1) * G, search, t, at + (Sets - 1) * G);
    decide<N, G, Absolute>(in, at);
    if (Sets == 2) decide<N, G, Absolute>(in + (Sets - 1) * G, at + (Sets - 1) * G);
    if (t < search.tries) propose<N, G>(in, search, t + 1, at);
  }
  for (uint32_t g = 0; g < Sets * G; ++g) store(in[g], search, input.levels, first + kLanes * g, &at[g], fit);
}

template <int N, bool Absolute>
void affine_all(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  uint32_t s = 0;
  for (; s + 4 * kLanes <= in.subs; s += 4 * kLanes) affine<N, 2, 2, Absolute>(in, search, s, fit);
  for (; s + 2 * kLanes <= in.subs; s += 2 * kLanes) affine<N, 2, 1, Absolute>(in, search, s, fit);
  for (; s < in.subs; s += kLanes) affine<N, 1, 1, Absolute>(in, search, s, fit);
}

void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  if (in.n == 16)
    return search.absolute ? affine_all<16, true>(in, search, fit) : affine_all<16, false>(in, search, fit);
  return search.absolute ? affine_all<32, true>(in, search, fit) : affine_all<32, false>(in, search, fit);
}
