// Mixture of experts: exact routing, experts fetched through the cache, tokens grouped by expert so that each record is
// used once per chunk, outputs summed in router order (so that a row does not depend on its neighbours or on arrival
// order).
#pragma once

#include <vector>

#include "blocks/ahead.h"
#include "blocks/ffn.h"
#include "blocks/router.h"
#include "experts/cache.h"
#include "smoe/session.h"
#include "util/lap.h"

namespace smoe {

struct MoeWeights {
  RouterWeights router;
  FfnWeights shared;       // weight.data null without a shared expert
  Linear shared_gate;      // [1, hidden]; data null without
  uint32_t moe_layer = 0;  // index into the cache's records
  RecordLayout record;
};

// y [input.rows(), hidden] = the block's output. `ready` is the caller's, so that the token loop allocates nothing.
// `ahead` (may be null) is what to read ahead once this layer's reads have begun. Each lap of `lap` goes into one of
// `buckets`.
Status moe(const Compute& c, const FfnSpec& spec, const MoeWeights& w, ExpertCache& cache, Activations& input,
           Workspace& ws, float* y, std::vector<ExpertRef>& ready, const Ahead* ahead, Lap* lap, Buckets* buckets);

}  // namespace smoe
