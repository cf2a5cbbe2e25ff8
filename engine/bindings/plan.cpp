// The memory plan, the machine and the two probes, for `smoe plan` and the tests.
#include "smoe/plan.h"

#include <pybind11/stl.h>

#include <map>

#include "bindings/bindings.h"
#include "io/probe.h"
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

KvType parse_kv(const std::string& name) {
  if (name == "f16") return KvType::f16;
  if (name == "f32") return KvType::f32;
  raise({Code::usage, "--kv " + name + " is not in this engine", "it has f16 and f32"});
}

py::dict plan(const std::string& vault_path, const std::string& scout, uint64_t budget_bytes, uint32_t ring,
              uint32_t ctx, uint32_t chunk, uint32_t threads, uint32_t sessions, const std::string& activations,
              const std::string& kv, uint32_t experts_per_token, uint64_t reserved_bytes, const std::string& root) {
  if (activations != "int8" && activations != "float") {
    raise({Code::usage, "--activations " + activations + " is not in this engine", "it has int8 and float"});
  }
  PlanOptions o;
  o.budget_bytes = budget_bytes;
  o.ring_slots = ring;
  o.ctx = ctx;
  o.chunk = chunk;
  o.threads = threads != 0 ? threads : usable_threads();
  o.sessions = sessions;
  o.float_activations = activations == "float";
  o.kv = o.float_activations ? KvType::f32 : parse_kv(kv);
  o.experts_per_token = experts_per_token;
  const VaultFile vault = check(open_vault(vault_path, scout));
  MachineMemory machine = check(read_machine_memory(root));
  machine.reserved_bytes = reserved_bytes;
  return plan_dict(vault.model, check(make_plan(vault.model, machine, o)));
}

py::dict disk(const std::string& path, uint64_t record_bytes, double seconds, uint32_t depth) {
  const auto speed = [&] {
    py::gil_scoped_release release;
    return probe_disk(path, record_bytes, seconds, depth);
  }();
  py::dict d;
  d["read_bytes_s"] = check(speed).read_bytes_s;
  d["direct"] = speed.value().direct;
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

void bind_plan(py::module_& m) {
  m.def(
      "machine_memory", [](const std::string& root) { return machine_dict(check(read_machine_memory(root))); },
      py::arg("root") = "",
      "What the machine and its control groups leave this process: *_bytes and what sets the limit. `root` is put "
      "before "
      "/proc and the cgroup mounts, for tests.");
  m.def("plan", &plan, py::arg("vault_path"), py::arg("scout") = "", py::kw_only(), py::arg("budget_bytes") = 0,
        py::arg("ring") = 0, py::arg("ctx") = PlanOptions().ctx, py::arg("chunk") = 0, py::arg("threads") = 0,
        py::arg("sessions") = 1, py::arg("activations") = "int8", py::arg("kv") = "f16",
        py::arg("experts_per_token") = 0, py::arg("reserved_bytes") = 0, py::arg("root") = "",
        "The memory plan the engine makes of a vault with these options. CoreError 'resources' below the floor.");
  m.def("probe_disk", &disk, py::arg("path"), py::arg("record_bytes"), py::arg("seconds") = 0.3, py::arg("depth") = 8,
        "Bytes per second of random whole-record reads, and whether they were direct.");
  m.def("probe_memory", &memory, py::arg("threads") = 0, py::arg("seconds") = 0.2,
        "Bytes per second that all threads together read from memory.");
  m.def(
      "usable_threads", [](const std::string& root) { return usable_threads(root); }, py::arg("root") = "",
      "CPUs this process may use: the affinity mask or the control groups' quota, whichever is smaller.");
}

}  // namespace smoe
