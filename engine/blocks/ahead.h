// Reading ahead: the experts that the next layer will ask for, read while this one computes. A guess changes when a
// record is read, never what is computed.
#pragma once

#include "blocks/linear.h"
#include "blocks/norm.h"
#include "blocks/router.h"
#include "blocks/workspace.h"
#include "experts/cache.h"
#include "smoe/model.h"

namespace smoe {

struct Ahead {
  // Of the layer to come.
  const FfnSpec* spec = nullptr;
  const RouterWeights* router = nullptr;
  const NormWeights* norm = nullptr;
  NormKind norm_kind{};
  float norm_eps = 0;
  uint32_t moe_layer = 0;
  size_t rows = 0;  // that it will compute

  const float* x = nullptr;  // [rows, hidden] the stream as it is now
  uint32_t most = 0;         // reads on a guess for one row; 0 = none
};

// Asks the coming layer's router what it would choose for this layer's stream, and has that read.
void read_ahead(const Compute& c, const Ahead& ahead, ExpertCache& cache, Workspace& ws);

}  // namespace smoe
