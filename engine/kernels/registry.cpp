// Which kernels there are, and which one runs.
#include <algorithm>

#include "kernels/act.h"
#include "kernels/kernels.h"
#include "quant/quant.h"

namespace smoe {
namespace {

std::vector<const Kernels*>& registered() {
  static std::vector<const Kernels*> all;  // a function's static: usable from other files' static initialisers
  return all;
}

std::string supported_names() {
  std::string names = "auto";
  for (const Kernels* k : all_kernels()) {
    if (k->supported()) names += std::string(" ") + k->name;
  }
  return names;
}

}  // namespace

RegisterKernels::RegisterKernels(const Kernels* k) {
  auto& all = registered();
  all.insert(std::upper_bound(all.begin(), all.end(), k, [](auto* a, auto* b) { return a->rank < b->rank; }), k);
}

const std::vector<const Kernels*>& all_kernels() { return registered(); }

Result<const Kernels*> choose_kernels(const std::string& isa) {
  const Kernels* best = nullptr;
  const Kernels* named = nullptr;
  bool scalar = false;
  for (const Kernels* k : all_kernels()) {  // by rising rank
    scalar |= std::string(k->name) == "scalar";
    if (k->supported()) best = k;
    if (k->name == isa) named = k;
  }
  if (!scalar) {
    return Status(Code::failed, "the scalar kernels are missing from this build",
                  "link the engine's objects directly: a static archive drops kernels that register themselves");
  }
  if (isa == "auto") return best;
  if (!named) return Status(Code::usage, "this build has no kernels for '" + isa + "'", "one of: " + supported_names());
  if (!named->supported()) {
    return Status(Code::usage, "this processor or its operating system does not support '" + isa + "'",
                  "one of: " + supported_names());
  }
  return named;
}

ActFormat act_format(Encoding weights) {
  const EncodingInfo& info = encoding_info(weights);
  if (info.plain) return ActFormat::none;
  return info.block_values == 256 ? ActFormat::q8_256 : ActFormat::q8_32;
}

size_t act_row_bytes(ActFormat format, size_t cols) {
  size_t bytes = 0;
  if (format == ActFormat::q8_32) bytes = cols / 32 * sizeof(Act32);
  if (format == ActFormat::q8_256) bytes = cols / 256 * sizeof(Act256);
  return (bytes + 63) / 64 * 64;
}

}  // namespace smoe
