// Part of fit_lanes.h: levels with a minimum, scale * level - min.

template <int N>
struct Weighted : Values<N> {  // and sums over them
  V sum_w, sum_wx, low, high, lowest;
  void sum_up() {
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

template <bool Absolute>
inline void add_error(const V& difference, const V& w, V* sum) {
  V size;
  magnitude(difference, &size);
  *sum += w * (Absolute ? size : difference * difference);
}

struct LevelSums {
  V wl, wl2, wlx;
  inline void add(const V& level, const V& x, const V& w) {
    const V weighted = w * level;
    wl += weighted;
    wl2 += weighted * level;
    wlx += weighted * x;
  }
};

// The levels of one group of sub-blocks and the sums over them; with Errors, beside them the errors of another group's
// levels. A sum waits for the one before it: only both together fill the processor.
template <int N, bool Low, bool High, bool Errors, bool Absolute>
inline void sum_near(const Weighted<N>& in, float most, Try<N>* at, LevelSums* sums, const Weighted<N>& other_in,
                     Try<N>* other) {
  const V turned = -at->inverse, low = at->low;
  const V scale = other->trial_scale, edge = other->edge;
  LevelSums found = {};
  V error = {};
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    V level;
    round_near<Low, High>(turned * (low - in.x[k]), 0.0f, most, &level);
    at->level[k] = level;
    found.add(level, in.x[k], in.w[k]);
    if (Errors) add_error<Absolute>(scale * other->level[k] + edge - other_in.x[k], other_in.w[k], &error);
  }
  *sums = found;
  if (Errors) other->error = error;
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
      add_error<Absolute>(scale[g] * at[g].level[k] + edge[g] - in[g].x[k], in[g].w[k], &sum[g]);
    }
  }
  for (int g = 0; g < G; ++g) at[g].error = sum[g];
}

// The places of all values lie between those of the lowest and the highest, which say what need not be clamped.
template <int N, bool Errors, bool Absolute>
inline void sum_levels(const Weighted<N>& in, const AffineSearch& search, Try<N>* at, LevelSums* sums,
                       const Weighted<N>& other_in, Try<N>* other) {
  const float most = static_cast<float>(search.most);
  const V first = at->inverse * (in.lowest - at->low), last = at->inverse * (in.high - at->low);
  if (all_within(first, -0.5f, last, most + 0.5f))
    return sum_near<N, false, false, Errors, Absolute>(in, most, at, sums, other_in, other);
  if (all_within(first, -0.5f, last, kReach))
    return sum_near<N, false, true, Errors, Absolute>(in, most, at, sums, other_in, other);
  if (within_reach(first, last)) return sum_near<N, true, true, Errors, Absolute>(in, most, at, sums, other_in, other);
  levels_at(in, search, at->inverse, at->low, search.clamped, at->level);
  LevelSums found = {};
  for (int k = 0; k < N; ++k) found.add(at->level[k], in.x[k], in.w[k]);
  *sums = found;
  if (Errors) weighted_errors<N, 1, Absolute>(&other_in, other);
}

// Weighted least squares for given levels; lanes that have no solution get no number, and so no better error.
template <int N>
inline void solve(const Weighted<N>& in, const LevelSums& sums, Try<N>* at) {
  const V determinant = in.sum_w * sums.wl2 - sums.wl * sums.wl;
  const V over = determinant > 0 ? determinant : V{} + std::numeric_limits<float>::quiet_NaN();
  const V edge = (sums.wl2 * in.sum_wx - sums.wl * sums.wlx) / over;
  at->trial_scale = (in.sum_w * sums.wlx - in.sum_wx * sums.wl) / over;
  at->edge = edge;
  if (!any_above(edge, 0.0f)) return;
  const W positive = edge > 0;
  at->trial_scale = positive ? sums.wlx / sums.wl2 : at->trial_scale;
  at->edge = positive ? V{} : edge;
}

template <int N>
inline void start(const Weighted<N>& in, const AffineSearch& search, Try<N>* at) {
  at->low = at->best_low = at->edge = in.low;
  at->best_inverse = static_cast<float>(search.most) / (in.high - in.low);
  at->scale = at->trial_scale = 1.0f / at->best_inverse;
  const V first = at->best_inverse * (in.lowest - in.low), last = at->best_inverse * (in.high - in.low);
  if (!all_within(first, -0.5f, last, static_cast<float>(search.most) + 0.5f))
    return levels_at(in, search, at->best_inverse, in.low, false, at->level);
  for (int k = 0; k < N; ++k) round_here(at->best_inverse * (in.x[k] - in.low), &at->level[k]);
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

// The inverse scale of try t. The range is the current one: a better fit moves its lower edge.
template <int N>
inline void aim(const Weighted<N>& in, const AffineSearch& search, int t, Try<N>* at) {
  const float wanted = search.first + search.step * static_cast<float>(t) + static_cast<float>(search.most);
  at->inverse = wanted / (in.high - at->low);
}

// A try has two halves: levels with the scale and edge that fit them best, and whether those err less. While one group
// is in its first half another is in its second, and those between wait for quotients and comparisons.
template <int N, int Groups, bool Absolute>
void affine(const FitInput& input, const AffineSearch& search, uint32_t first, AffineFit* fit) {
  constexpr int kBehind = Groups / 2;  // groups between the two halves
  Weighted<N> in[Groups];
  Try<N> at[Groups];
  load_groups<N, Groups>(from(input, first), in);
  for (int g = 0; g < Groups; ++g) {
    in[g].sum_up();
    start(in[g], search, &at[g]);
  }
  weighted_errors<N, Groups, Absolute>(in, at);
  for (int g = 0; g < Groups; ++g) {
    at[g].best = at[g].error;
    aim(in[g], search, 0, &at[g]);
  }
  LevelSums sums;
  for (int t = 0; t <= search.tries; ++t) {
    for (int g = 0; g < Groups; ++g) {
      const int other = (g + kBehind) % Groups;
      if (Groups == 1 || (t == 0 && g < kBehind)) {
        sum_levels<N, false, Absolute>(in[g], search, &at[g], &sums, in[other], &at[other]);
        solve(in[g], sums, &at[g]);
        if (Groups > 1) continue;
        weighted_errors<N, 1, Absolute>(in, at);
      } else {
        sum_levels<N, true, Absolute>(in[g], search, &at[g], &sums, in[other], &at[other]);
        solve(in[g], sums, &at[g]);
      }
      keep_better(&at[other]);
      aim(in[other], search, g < kBehind ? t : t + 1, &at[other]);
    }
  }
  if constexpr (kBehind > 0) {
    weighted_errors<N, kBehind, Absolute>(in + Groups - kBehind, at + Groups - kBehind);
    for (int g = Groups - kBehind; g < Groups; ++g) keep_better(&at[g]);
  }
  for (uint32_t g = 0; g < Groups; ++g) store(in[g], search, input.levels, first + kLanes * g, &at[g], fit);
}

template <int N, bool Absolute>
void affine_all(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  uint32_t s = 0;
  for (; s + 4 * kLanes <= in.subs; s += 4 * kLanes) affine<N, 4, Absolute>(in, search, s, fit);
  for (; s + 2 * kLanes <= in.subs; s += 2 * kLanes) affine<N, 2, Absolute>(in, search, s, fit);
  for (; s < in.subs; s += kLanes) affine<N, 1, Absolute>(in, search, s, fit);
}

void fit_affine(const FitInput& in, const AffineSearch& search, AffineFit* fit) {
  if (in.n == 16)
    return search.absolute ? affine_all<16, true>(in, search, fit) : affine_all<16, false>(in, search, fit);
  return search.absolute ? affine_all<32, true>(in, search, fit) : affine_all<32, false>(in, search, fit);
}
