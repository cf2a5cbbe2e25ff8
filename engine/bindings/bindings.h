// What each room offers to Python. A failed Status becomes smoe_cli._core.CoreError(message) with .code ("corrupt",
// "usage", "resources", "io", "failed", "cancelled") and .hint; smoe_cli.errors turns it into its own tree.
#pragma once

#include <pybind11/pybind11.h>

#include "smoe/plan.h"
#include "smoe/status.h"

namespace smoe {

void bind_errors(pybind11::module_& m);
void bind_quant(pybind11::module_& m);    // encode, decode, pack, unpack, encoding tables
void bind_vault(pybind11::module_& m);    // inspect, verify, VaultWriter, crc32c
void bind_plan(pybind11::module_& m);     // plan, machine_memory, probe_disk
void bind_replay(pybind11::module_& m);   // replay, trace_info, policies
void bind_sampler(pybind11::module_& m);  // sample_probs, sample_draws
void bind_engine(pybind11::module_& m);   // Engine: logits, route trace, generate, for the conformance tests and gates

// A plan by the names of `smoe plan --json`.
pybind11::dict plan_dict(const ModelSpec& model, const Plan& plan);

[[noreturn]] void raise(const Status& status);
inline void check(const Status& status) {
  if (!status.is_ok()) raise(status);
}
template <class T>
T check(Result<T> result) {
  if (!result.is_ok()) raise(result.status());
  return std::move(result).value();
}

}  // namespace smoe
