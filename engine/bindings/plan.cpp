// The memory plan, the machine and the two probes, for `smoe plan` and the tests.
#include "smoe/plan.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/launch_flags.h"
#include "core/options.h"
#include "io/probe.h"
#include "util/ledger.h"
#include "util/memory_probe.h"
#include "util/threads.h"
#include "vault/vault.h"

namespace py = pybind11;

namespace smoe {
namespace {

py::dict machine_dict(const MachineMemory& m) {
  py::dict d;
  d["physical_ram_bytes"] = m.physical_ram_bytes;
  d["usable_ram_bytes"] = m.usable_ram_bytes - std::min(m.usable_ram_bytes, m.reserved_bytes);
  d["reserved_bytes"] = m.reserved_bytes;
  d["available_bytes"] = m.available_bytes;
  d["limited_by"] = m.limited_by;
  return d;
}

py::dict plan(const std::string& path, const py::kwargs& options) {
  std::vector<std::string> flags = launch_flags(options);
  flags.insert(flags.begin(), {"--vault=" + path, "--serve"});
  Launch launch = check(parse_launch({flags.begin(), flags.end()}));
  check(resolve_window(&launch));
  const VaultFile vault = check(open_vault(path, launch.engine.scout));
  return plan_dict(vault.model, check(plan_here(vault.model, &launch.engine.plan, launch.engine.ledger)));
}

py::dict disk(const std::string& path, uint64_t record_bytes, double seconds, uint32_t depth, bool buffered,
              const std::string& io, uint32_t parts, bool batches) {
  ProbeOptions options{seconds, depth, parts, batches, DirectMode::automatic, ReaderKind::automatic};
  if (buffered) options.mode = DirectMode::buffered;
  if (io == "uring") options.kind = ReaderKind::uring;
  if (io == "pread") options.kind = ReaderKind::pread;
  const auto speed = [&] {
    py::gil_scoped_release release;
    return probe_disk(path, record_bytes, options);
  }();
  py::dict d;
  d["read_bytes_s"] = check(speed).read_bytes_s;
  d["direct"] = speed.value().direct;
  d["io"] = speed.value().backend;
  return d;
}

double memory(uint32_t threads, double seconds) {
  const auto speed = [&] {
    py::gil_scoped_release release;
    return probe_memory(threads != 0 ? threads : usable_threads(), seconds);
  }();
  return check(speed);
}

}  // namespace

py::dict plan_dict(const ModelSpec& model, const Plan& p) {
  py::dict d;
  d["model"] = model.id;
  d["ctx"] = p.ctx;
  d["chunk"] = p.chunk;
  d["trunk_bytes"] = p.trunk_bytes;
  d["state_bytes"] = p.state_bytes;
  d["scratch_bytes"] = p.scratch_bytes;
  d["process_bytes"] = p.process_bytes;
  d["min_expert_cache_bytes"] = p.min_expert_cache_bytes;
  d["floor_bytes"] = p.floor_bytes;
  d["working_set_bytes"] = p.working_set_bytes;
  d["recommended_bytes"] = p.recommended_bytes;
  d["all_experts_bytes"] = p.all_experts_bytes;
  d["all_resident_bytes"] = p.all_resident_bytes;
  d["physical_ram_bytes"] = p.physical_ram_bytes;
  d["usable_ram_bytes"] = p.usable_ram_bytes;
  d["reserved_bytes"] = p.reserved_bytes;
  d["limited_by"] = p.limited_by;
  d["ceiling_bytes"] = p.ceiling_bytes;
  d["budget_bytes"] = p.budget_bytes;
  d["budget_reason"] = p.budget_reason;
  d["expert_cache_bytes"] = p.expert_cache_bytes;
  d["slots"] = p.slots;
  d["total_records"] = p.total_records;
  d["record_bytes"] = p.record_bytes;
  d["warnings"] = p.warnings;
  return d;
}

void bind_plan(py::module_& m) {
  m.def(
      "machine_memory",
      [](const std::string& root, const std::string& ledger) {
        MachineMemory machine = check(read_machine_memory(root));
        if (!ledger.empty()) machine.reserved_bytes = check(Ledger::open(ledger)).reserved_by_others();
        return machine_dict(machine);
      },
      py::arg("root") = "", py::arg("ledger") = "",
      "What the machine and its control groups leave this process: *_bytes and what sets the limit. `root` is put "
      "before "
      "/proc and the cgroup mounts, for tests.");
  m.def("plan", &plan, py::arg("path"),
        "plan(path, **options): the memory plan an engine started now with these launch flags would make, sizes in "
        "bytes. Options as for Engine. CoreError 'resources' below the floor.");
  m.def("probe_disk", &disk, py::arg("path"), py::arg("record_bytes"), py::arg("seconds") = 0.3, py::arg("depth") = 8,
        py::arg("buffered") = false, py::arg("io") = "auto", py::arg("parts") = 1, py::arg("batches") = false,
        "Reads whole records at random places, `depth` at a time, each cut into `parts` reads; with `batches` all are "
        "awaited before the next. read_bytes_s, whether they were direct, and the backend (io).");
  m.def("probe_memory", &memory, py::arg("threads") = 0, py::arg("seconds") = 0.2,
        "Bytes per second that all threads together read from memory.");
  m.def(
      "usable_threads", [](const std::string& root) { return usable_threads(root); }, py::arg("root") = "",
      "CPUs this process may use: the affinity mask or the control groups' quota, whichever is smaller.");
}

}  // namespace smoe
