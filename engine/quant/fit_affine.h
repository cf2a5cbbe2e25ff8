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

// Levels for an inverse scale. Those of all values lie between those of the lowest and the highest.
template <int N>
inline bool near(const Weighted<N>& in, const V& inverse, const V& low) {
  return within_reach(inverse * (in.high - low), inverse * (in.lowest - low));
}

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
  W usable;
};

struct LevelSums {
  V wl = {}, wl2 = {}, wlx = {};
  inline void add(const V& level, const V& x, const V& w) {
    const V weighted = w * level;
    wl += weighted;
    wl2 += weighted * level;
    wlx += weighted * x;
  }
};

// The levels of G groups of sub-blocks side by side, so that the sums of one fill the latency of the other's.
template <int N, int G>
inline void sum_levels(const Weighted<N>* in, const AffineSearch& search, Try<N>* at, LevelSums* sums) {
  const float most = static_cast<float>(search.most);
  bool all_near = true;
  for (int g = 0; g < G; ++g) all_near &= near(in[g], at[g].inverse, at[g].low);
  if (!all_near) {
    for (int g = 0; g < G; ++g) {
      levels_at(in[g], search, at[g].inverse, at[g].low, search.clamped, at[g].level);
      for (int k = 0; k < N; ++k) sums[g].add(at[g].level[k], in[g].x[k], in[g].w[k]);
    }
    return;
  }
  LevelSums found[G];
  V inverse[G], low[G];
  for (int g = 0; g < G; ++g) {
    inverse[g] = at[g].inverse;
    low[g] = at[g].low;
  }
  for (int k = 0; k < N; ++k) {
    for (int g = 0; g < G; ++g) {
      V level;
      round_near(inverse[g] * (in[g].x[k] - low[g]), 0.0f, most, &level);
      at[g].level[k] = level;
      found[g].add(level, in[g].x[k], in[g].w[k]);
    }
  }
  for (int g = 0; g < G; ++g) sums[g] = found[g];
}

// Weighted least squares for given levels; false lanes of `usable` have no solution.
template <int N>
inline void solve(const Weighted<N>& in, const LevelSums& sums, Try<N>* at) {
  const V determinant = in.sum_w * sums.wl2 - sums.wl * sums.wl;
  at->usable = determinant > 0;
  const V scale = (in.sum_w * sums.wlx - in.sum_wx * sums.wl) / determinant;
  const V edge = (sums.wl2 * in.sum_wx - sums.wl * sums.wlx) / determinant;
  const W positive = edge > 0;
  at->trial_scale = positive ? sums.wlx / sums.wl2 : scale;
  at->edge = positive ? V{} : edge;
}

template <int N, int G, bool Absolute>
inline void weighted_errors(const Weighted<N>* in, Try<N>* at) {
  V sum[G] = {}, scale[G], edge[G];
  for (int g = 0; g < G; ++g) {
    scale[g] = at[g].trial_scale;
    edge[g] = at[g].edge;
  }
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
  const W better = at->usable & (at->error < at->best);
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

template <int N, int G, bool Absolute>
void affine(const FitInput& input, const AffineSearch& search, uint32_t first, AffineFit* fit) {
  Weighted<N> in[G];
  Try<N> at[G];
  for (uint32_t g = 0; g < G; ++g) {
    in[g].load(from(input, first + kLanes * g));
    start(in[g], search, &at[g]);
  }
  weighted_errors<N, G, Absolute>(in, at);
  for (int g = 0; g < G; ++g) at[g].best = at[g].error;
  for (int t = 0; t <= search.tries; ++t) {
    // The range is the current one: a better fit moves its lower edge.
    const float wanted = search.first + search.step * static_cast<float>(t) + static_cast<float>(search.most);
    for (int g = 0; g < G; ++g) at[g].inverse = wanted / (in[g].high - at[g].low);
    LevelSums sums[G];
    sum_levels<N, G>(in, search, at, sums);
    for (int g = 0; g < G; ++g) solve(in[g], sums[g], &at[g]);
    weighted_errors<N, G, Absolute>(in, at);
    for (int g = 0; g < G; ++g) keep_better(&at[g]);
  }
  for (uint32_t g = 0; g < G; ++g) store(in[g], search, input.levels, first + kLanes * g, &at[g], fit);
}

template <int N, bool Absolute>
void affine_all(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  uint32_t s = 0;
  for (; s + 2 * kLanes <= in.subs; s += 2 * kLanes) affine<N, 2, Absolute>(in, search, s, fit);
  for (; s < in.subs; s += kLanes) affine<N, 1, Absolute>(in, search, s, fit);
}

void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  if (in.n == 16)
    return search.absolute ? affine_all<16, true>(in, search, fit) : affine_all<16, false>(in, search, fit);
  return search.absolute ? affine_all<32, true>(in, search, fit) : affine_all<32, false>(in, search, fit);
}
