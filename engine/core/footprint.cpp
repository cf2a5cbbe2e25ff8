#include "core/footprint.h"

#include "core/kv_state.h"
#include "core/sampler.h"
#include "core/scratch.h"
#include "core/trunk.h"

namespace smoe {

uint64_t engine_trunk_bytes(const ModelSpec& model) { return Trunk::bytes(model); }

uint64_t engine_state_bytes(const ModelSpec& model, const PlanOptions& options, uint32_t chunk) {
  return options.sessions * KvState::bytes(model, options.ctx, chunk, options.kv);
}

uint64_t engine_recurrent_bytes(const ModelSpec& model, const PlanOptions& options) {
  return options.sessions * RecurrentState::bytes(model);
}

uint64_t engine_scratch_bytes(const ModelSpec& model, const PlanOptions& options, uint32_t chunk) {
  const uint64_t sequence = Sampler::bytes(model.vocab) + model.hidden * sizeof(float);
  const uint32_t rows = Scratch::own_rows(model, chunk, options.sessions);
  return Scratch::bytes(model, rows, options.threads) + options.sessions * sequence;
}

uint64_t engine_chunk_bytes(const ModelSpec& model, const PlanOptions& options, uint32_t chunk) {
  const bool more = chunk > Scratch::own_rows(model, chunk, options.sessions);
  return more ? Scratch::chunk_bytes(model, chunk, options.threads) : 0;
}

}  // namespace smoe
