// Routing traces and the cache policies, for scripts and tests.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "experts/trace.h"

namespace py = pybind11;

namespace smoe {
namespace {

py::dict counts_dict(const ReplayCounts& n) {
  py::dict d;
  d["hits"] = n.hits;
  d["misses"] = n.misses;
  d["evictions"] = n.evictions;
  d["decode_hits"] = n.decode_hits;
  d["decode_misses"] = n.decode_misses;
  d["steps"] = n.steps;
  return d;
}

py::dict replay(const std::string& path, const std::string& policy, uint32_t slots, uint64_t skip) {
  const auto counts = [&]() -> Result<ReplayCounts> {
    py::gil_scoped_release release;
    SMOE_ASSIGN(TraceReader trace, TraceReader::open(path));
    return policy == "optimal" ? replay_optimal(trace, slots, skip) : replay_trace(trace, policy, slots, skip);
  }();
  return counts_dict(check(counts));
}

py::dict info(const std::string& path) {
  TraceReader trace = check(TraceReader::open(path));
  uint64_t fetches = 0, steps = 0, asked = 0;
  for (TraceEvent e; check(trace.next(&e));) {
    if (e.kind != TraceEvent::Kind::fetch) continue;
    ++fetches;
    asked += e.experts.size();
    if (e.tokens == 1 && e.layer == 0) ++steps;
  }
  py::dict d;
  d["model"] = trace.header().model;
  d["policy"] = trace.header().policy;
  d["slots"] = trace.header().slots;
  d["experts"] = trace.header().experts;
  d["top_k"] = trace.header().top_k;
  d["fetches"] = fetches;
  d["steps"] = steps;
  d["asked"] = asked;
  return d;
}

py::list fetches(const std::string& path) {
  TraceReader trace = check(TraceReader::open(path));
  py::list all;
  for (TraceEvent e; check(trace.next(&e));) {
    if (e.kind == TraceEvent::Kind::fetch) all.append(py::make_tuple(e.layer, e.tokens, e.experts, e.uses));
  }
  return all;
}

}  // namespace

void bind_replay(py::module_& m) {
  m.def("policies", &policy_names, "The cache policies, by the names that --cache-policy takes.");
  m.attr("default_policy") = kDefaultPolicy;
  m.def(
      "replay", &replay, py::arg("trace"), py::arg("policy") = "", py::arg("slots") = 0, py::arg("skip") = 0,
      "A routing trace (--trace FILE) through a cache of `slots` under `policy`, by the code of the live cache: hits, "
      "misses, evictions, those of decode steps (decode_hits, decode_misses) and how many there were (steps). Left "
      "out: the size and policy that were traced. \"optimal\" is the clairvoyant bound. The first `skip` fetches only "
      "warm it up.");
  m.def("trace_info", &info, py::arg("trace"),
        "model, policy, slots, experts and top_k of each MoE layer; fetches, decode steps, experts asked for.");
  m.def("trace_fetches", &fetches, py::arg("trace"),
        "[(MoE layer, tokens, experts, uses)] in order; uses is empty where each expert was used once.");
}

}  // namespace smoe
