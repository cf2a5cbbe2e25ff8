// What the engine allocates, in bytes, by the same code that allocates it. The memory plan adds these up.
#pragma once

#include <cstdint>

#include "smoe/model.h"
#include "smoe/plan.h"

namespace smoe {

// Trunk tensors as held in memory: matrices as stored, vectors (norms, biases) as float32.
uint64_t engine_trunk_bytes(const ModelSpec& model);
// What all sessions hold: per layer the keys and values of a ring of min(window, ctx) + chunk rows, or its state.
uint64_t engine_state_bytes(const ModelSpec& model, const PlanOptions& options, uint32_t chunk);
// The part of it that is of one size whatever the window: the states of recurrent layers.
uint64_t engine_recurrent_bytes(const ModelSpec& model, const PlanOptions& options);
// Activations and staging that are always there, for a chunk, or where there are experts for a step; for each session a
// sampler, and the hidden state that waits for a mask.
uint64_t engine_scratch_bytes(const ModelSpec& model, const PlanOptions& options, uint32_t chunk);
// The buffers of a whole chunk where there are experts, 0 where there are none: they lie in slots of the expert cache
// while a prompt is computed.
uint64_t engine_chunk_bytes(const ModelSpec& model, const PlanOptions& options, uint32_t chunk);

}  // namespace smoe
