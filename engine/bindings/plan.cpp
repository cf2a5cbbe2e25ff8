// The memory plan, the machine and the two probes, for `smoe plan` and the tests.
#include "smoe/plan.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/launch_flags.h"
#include "core/options.h"
#include "core/rates.h"
#include "core/rehearsal.h"
#include "core/speed.h"
#include "experts/history.h"
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

// The plan, with what the machine was measured to do and the speed that follows. `ids`: a text to rehearse with.
py::dict predict(const std::string& path, double seconds, const std::vector<int32_t>& ids, double rehearsed_bytes,
                 const py::kwargs& options) {
  std::vector<std::string> flags = launch_flags(options);
  flags.insert(flags.begin(), {"--vault=" + path, "--serve"});
  Launch launch = check(parse_launch({flags.begin(), flags.end()}));
  check(resolve_window(&launch));
  EngineOptions& engine = launch.engine;
  const VaultFile vault = check(open_vault(path, engine.scout));
  engine.scout = vault.scout_path;
  const Plan plan = check(plan_here(vault.model, &engine.plan, engine.ledger));
  const ModelSpec model = as_run(vault.model, engine.plan);
  const Rates rates = check([&] {
    py::gil_scoped_release release;
    return measure_rates(model, engine, seconds);
  }());
  const Rehearsal rehearsal = check([&] {
    py::gil_scoped_release release;
    return rehearse(vault, engine, plan, ids, rehearsed_bytes);
  }());
  std::vector<float> history;
  if (!engine.history.empty()) {
    Result<std::vector<float>> kept =
        read_history(engine.history, history_fingerprint(vault.manifest_json), plan.total_records);
    if (kept.is_ok()) history = std::move(kept).value();
  }
  const Speed speed = predict_speed(model, plan, rates, rehearsal, history);
  py::dict d = plan_dict(vault.model, plan);
  d["disk_read_bytes_s"] = rates.disk_read_bytes_s;
  d["direct_io"] = rates.direct_io;
  d["memory_read_bytes_s"] = rates.memory_bytes_s;
  d["predicted_hit_rate"] = speed.hit_rate;
  d["predicted_from_history"] = speed.from_history;
  d["predicted_decode_tok_s"] = speed.decode_tok_s;
  d["predicted_decode_low_tok_s"] = speed.decode_low_tok_s;
  d["predicted_decode_high_tok_s"] = speed.decode_high_tok_s;
  d["predicted_prefill_tok_s"] = speed.prefill_tok_s;
  d["rehearsed_token_ms"] = rehearsal.token_s * 1e3;
  d["rehearsed_attention_ms"] = rehearsal.attention_s * 1e3;
  d["rehearsed_prompt_ms"] = rehearsal.prompt_s * 1e3;
  d["rehearsed_prompt_experts"] = rehearsal.prompt_experts;
  d["rehearsed_hit_rate"] = rehearsal.hit_rate;
  d["rehearsed_layers"] = rehearsal.layers;
  d["read_first_ms"] = rates.read_first_s * 1e3;
  d["read_each_ms"] = rates.read_each_s * 1e3;
  return d;
}

py::dict disk(const std::string& path, uint64_t record_bytes, double seconds, uint32_t depth, bool buffered,
              const std::string& io, uint32_t parts, bool batches) {
  ProbeOptions options{seconds, depth, parts, batches, 0, DirectMode::automatic, ReaderKind::automatic};
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
  d["recurrent_state_bytes"] = p.recurrent_bytes;
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
  d["cache_slots"] = p.cache_slots;
  d["chunk_slots"] = p.chunk_slots;
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
        Status trouble;
        if (!ledger.empty()) {
          const Result<Ledger> book = Ledger::open(ledger);
          trouble = book.status();
          if (book.is_ok()) machine.reserved_bytes = book.value().reserved_by_others();
        }
        py::dict d = machine_dict(machine);
        if (!trouble.is_ok()) d["warning"] = "other running engines are not counted: " + trouble.message();
        return d;
      },
      py::arg("root") = "", py::arg("ledger") = "",
      "What the machine and its control groups leave this process: *_bytes and what sets the limit. `root` is put "
      "before "
      "/proc and the cgroup mounts, for tests.");
  m.def("plan", &plan, py::arg("path"),
        "plan(path, **options): the memory plan an engine started now with these launch flags would make, sizes in "
        "bytes. Options as for Engine. CoreError 'resources' below the floor.");
  m.def("predict", &predict, py::arg("path"), py::arg("seconds") = 1.0, py::arg("ids") = std::vector<int32_t>(),
        py::arg("rehearsed_bytes") = kRehearsedBytes,
        "predict(path, seconds, ids, **options): the plan, the disk and memory speeds measured for about `seconds`, a "
        "rehearsal of the model with these ids (none: random ones; rehearsed_*) in which a token goes through that "
        "many bytes of layers, and the decode and prefill speeds that "
        "follow (predicted_*); history=FILE counts what was used before.");
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
