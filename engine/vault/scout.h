// The scout: a plain safetensors file with the trunk. Its header is written and read here.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "smoe/model.h"
#include "smoe/status.h"
#include "vault/vault.h"

namespace smoe::scout {

struct Tensor {
  std::string name, dtype;  // "F32" "F16" "BF16" "U8"
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
};

struct Layout {
  std::string header;                         // everything before the data: u64 length, JSON, padding to 64 bytes
  std::map<std::string, TrunkEntry> entries;  // offsets in the file
  uint64_t file_bytes = 0;
};

// Where each tensor goes: widest dtype first so that every tensor is aligned to its own, otherwise in the order given.
// Errors: Code::usage (unknown dtype, bytes that are not the shape's, a name twice).
Result<Layout> lay_out(std::vector<Tensor> tensors);

// Reads a header (its first 8 bytes included) against the manifest's tensors, in both directions; no gaps, no overlaps.
Result<std::map<std::string, TrunkEntry>> parse(const std::string& header, uint64_t file_bytes, const ModelSpec& model);

}  // namespace smoe::scout
