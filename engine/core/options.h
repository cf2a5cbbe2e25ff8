// The command line of `smoe-engine` -> what to open and how to serve it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "smoe/engine.h"

namespace smoe {

struct Launch {
  EngineOptions engine;
  bool serve = false, instrument = false, help = false, version = false;
  bool ctx_max = false;       // --ctx max: the model's own limit
  std::string tokens_file;    // --tokens-in; "-" is stdin
  uint32_t max_tokens = 256;  // of the --tokens-in request

  // Sampling flags that were given.
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<uint32_t> top_k;
  std::optional<uint64_t> seed;
};

// Flags as `--name value` or `--name=value`. Errors: Code::usage naming the flag and what it takes.
Result<Launch> parse_launch(const std::vector<std::string_view>& args);

// Turns --ctx max into the number that the vault's manifest gives. Errors: those of opening the vault.
Status resolve_window(Launch* launch);

// The launch flag over the vault's generation config over 0.6 / 0.95 / 50 / 1.1.
Sampling default_sampling(const Launch& launch, const GenerationDefaults& vault);

// "512M", "7.5G", "1024": K M G T are powers of 1024. False unless a size of at least one byte that fits.
bool parse_size(std::string_view text, uint64_t* bytes);

std::string launch_help();
int exit_code(Code code);

}  // namespace smoe
