// The pybind11 module smoe_cli._core: each room binds itself in bindings/<room>.cpp.
#include "bindings/bindings.h"

#include <pybind11/pybind11.h>

PYBIND11_MODULE(_core, m) {
  m.doc() = "smoe engine core: encodings, vault files, memory plan, and the engine itself";
  m.attr("__version__") = SMOE_VERSION;
  smoe::bind_errors(m);
  smoe::bind_quant(m);
  smoe::bind_vault(m);
  smoe::bind_plan(m);
  smoe::bind_replay(m);
  smoe::bind_sampler(m);
  smoe::bind_engine(m);
}
