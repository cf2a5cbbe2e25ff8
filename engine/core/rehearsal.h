// What a token costs where nothing is read, and what it asks for: the engine's own pass over a prompt and some tokens,
// with the model's trunk and a few experts of each layer, which stand in for the others (core/stand_ins.h). Little is
// read for it, and yet its times are those of this model's attention, routers, products and threads on this machine,
// and its routing is nearly that of the whole model (LEARNED.md, 2026-11-30-rehearsal).
//
// Of a large model the first layers are rehearsed, and the others are taken to be like the later of them.
#pragma once

#include <cstdint>
#include <vector>

#include "smoe/engine.h"
#include "smoe/plan.h"
#include "vault/vault.h"

namespace smoe {

inline constexpr uint32_t kPromptTokens = 512;
// Layers are rehearsed, from the first, until a token goes through so many bytes of them, and in no more memory than
// the plan's budget; two at least, and one with experts. A second or two on two cores.
inline constexpr double kRehearsedBytes = 400 << 20;

// Times are of the whole model, in seconds.
struct Rehearsal {
  double token_s = 0;      // decoding after a prompt of kPromptTokens, everything in memory; the median of some steps
  double attention_s = 0;  // of token_s, what passes in one layer before its experts are asked for
  double prompt_s = 0;     // a prompt of kPromptTokens, computed in the plan's chunks, everything in memory
  double prompt_experts = 0;  // that it asks for, each once a chunk, in a layer with experts on average
  double hit_rate = 1;        // what a cache of the plan's slots finds of that prompt's last tokens, taken one by one
  uint32_t layers = 0;        // that were rehearsed
};

// `ids`: a text of this model's; repeated where it is short, and random ids where it is empty. Errors: those of opening
// an engine, and Code::usage for an id outside the vocabulary.
Result<Rehearsal> rehearse(const VaultFile& vault, const EngineOptions& options, const Plan& plan,
                           const std::vector<int32_t>& ids, double most_bytes = kRehearsedBytes);

}  // namespace smoe
