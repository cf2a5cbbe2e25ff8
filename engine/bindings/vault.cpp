#include "vault/vault.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "vault/writer.h"

namespace py = pybind11;

namespace smoe {
namespace {

// A contiguous buffer (bytes, memoryview, NumPy array), held for the life of this object.
class Bytes {
 public:
  explicit Bytes(const py::object& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }
  const void* data() const { return view_.buf; }
  uint64_t size() const { return static_cast<uint64_t>(view_.len); }

 private:
  Py_buffer view_{};
};

py::dict inspect(const std::string& path, const std::optional<std::string>& scout) {
  const VaultFile vault = check([&] {
    py::gil_scoped_release release;
    return open_vault(path, scout.value_or(""));
  }());
  uint64_t records = 0;
  std::vector<uint64_t> record_bytes;
  std::vector<std::vector<uint64_t>> record_offsets;
  for (const auto& layer : vault.records) {
    records += layer.size();
    record_bytes.push_back(layer.front().length);
    record_offsets.emplace_back();
    for (const ExpertRecord& record : layer) record_offsets.back().push_back(record.offset);
  }
  py::dict out;
  out["manifest"] = vault.manifest_json;
  out["path"] = vault.path;
  out["scout_path"] = vault.scout_path;
  out["tokenizer_dir"] = vault.tokenizer_dir;
  out["file_bytes"] = vault.file_bytes;
  out["scout_bytes"] = vault.scout_bytes;
  out["total_bytes"] = vault.file_bytes + vault.scout_bytes;
  out["records"] = records;
  out["record_bytes"] = record_bytes;
  out["record_offsets"] = record_offsets;
  return out;
}

// `progress` may raise, and Ctrl-C works without one: either ends the work and comes out here.
py::dict verify(const std::string& path, const py::object& progress) {
  std::optional<py::error_already_set> raised;
  const auto step = [&](uint64_t done, uint64_t total) {
    py::gil_scoped_acquire acquire;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (progress.is_none()) return true;
      const py::object answer = progress(done, total);
      return answer.is_none() || answer.cast<bool>();
    } catch (py::error_already_set& error) {
      raised.emplace(error);
      return false;
    }
  };
  VerifyReport report;
  {
    py::gil_scoped_release release;
    report = verify_vault(path, step);
  }
  if (raised) throw *raised;
  py::dict out;
  out["ok"] = report.ok();
  out["checked_bytes"] = report.checked_bytes;
  out["errors"] = report.errors;
  return out;
}

py::dict layout(uint32_t hidden, uint32_t width, const std::string& gate, const std::string& up,
                const std::string& down, bool bias) {
  FfnSpec ffn;
  ffn.expert_bias = bias;
  ffn.experts = 1;
  ffn.expert_width = width;
  const auto set = [](const std::string& name, Encoding* out) {
    if (!parse_encoding(name, out)) raise(Status(Code::usage, "unknown encoding: " + name));
  };
  set(gate, &ffn.encodings.gate);
  set(up, &ffn.encodings.up);
  set(down, &ffn.encodings.down);
  const RecordLayout r = record_layout(ffn, hidden);
  py::dict out;
  out["gate"] = r.gate;
  out["up"] = r.up;
  out["down"] = r.down;
  if (bias) {
    out["gate_bias"] = r.gate_bias;
    out["up_bias"] = r.up_bias;
    out["down_bias"] = r.down_bias;
  }
  out["end"] = r.end;
  out["length"] = r.length;
  return out;
}

using LayerTuple = std::tuple<uint32_t, uint32_t, uint64_t>;
using TrunkTuple = std::tuple<std::string, std::string, std::vector<uint64_t>, uint64_t>;

std::unique_ptr<VaultWriter> open_writer(const std::string& folder, const std::string& stem,
                                         const std::string& fingerprint, const std::vector<LayerTuple>& layers,
                                         const std::vector<TrunkTuple>& trunk, bool resume) {
  WriterOptions o{folder, stem, fingerprint, {}, {}, resume};
  for (const auto& [layer, experts, bytes] : layers) o.layers.push_back({layer, experts, bytes});
  for (const auto& [name, dtype, shape, bytes] : trunk) o.trunk.push_back({name, dtype, shape, bytes});
  return check([&] {
    py::gil_scoped_release release;
    return VaultWriter::open(std::move(o));
  }());
}

// Runs `work` without the GIL and raises what it returns.
template <class Work>
void unlocked(Work&& work) {
  const Status status = [&] {
    py::gil_scoped_release release;
    return work();
  }();
  check(status);
}

void bind_writer(py::module_& m) {
  py::class_<VaultWriter>(
      m, "VaultWriter",
      "Writes a vault: resumable after a kill at any moment, atomic. Thread-safe.\n\n"
      "layers: (absolute layer, experts, record bytes); trunk: (name, safetensors dtype, shape, bytes).\n"
      "Raises CoreError: usage (another source or geometry: pass --fresh), resources, io.")
      .def(py::init(&open_writer), py::arg("out_dir"), py::arg("stem"), py::arg("fingerprint"), py::arg("layers"),
           py::arg("trunk"), py::arg("resume") = true)
      .def("done_records", &VaultWriter::done_records, "[(MoE layer, expert)] already on disk, read back and right.")
      .def("done_tensors", &VaultWriter::done_tensors,
           "Names of the trunk tensors already on disk, read back and right.")
      .def(
          "write_record",
          [](VaultWriter& w, uint32_t layer, uint32_t expert, const py::object& data) {
            const Bytes bytes(data);
            unlocked([&] { return w.write_record(layer, expert, bytes.data(), bytes.size()); });
          },
          py::arg("moe_layer"), py::arg("expert"), py::arg("data"), "The record up to its end; padding is added.")
      .def(
          "write_tensor",
          [](VaultWriter& w, const std::string& name, const py::object& data) {
            const Bytes bytes(data);
            unlocked([&] { return w.write_tensor(name, bytes.data(), bytes.size()); });
          },
          py::arg("name"), py::arg("data"), "A trunk tensor's stored bytes.")
      .def(
          "tensor_crc", [](const VaultWriter& w, const std::string& name) { return check(w.tensor_crc(name)); },
          py::arg("name"), "CRC-32C of a written tensor, for the manifest.")
      .def(
          "scout_info",
          [](const VaultWriter& w) {
            py::dict out;
            out["bytes"] = w.scout_bytes();
            out["header_crc32c"] = w.scout_header_crc();
            return out;
          },
          "The manifest's `scout` object.")
      .def(
          "finish", [](VaultWriter& w, const std::string& manifest) { unlocked([&] { return w.finish(manifest); }); },
          py::arg("manifest_json"),
          "Appends table and manifest, checks, flushes, takes the final names; <stem>.tokenizer.part becomes\n"
          "<stem>.tokenizer in the same step (write it after this object was made).")
      .def(
          "abort",
          [](VaultWriter& w) {
            py::gil_scoped_release release;
            w.close();
          },
          "Closes; the part files stay, to be resumed.");
}

}  // namespace

void bind_vault(py::module_& m) {
  m.def("inspect", &inspect, py::arg("path"), py::arg("scout") = py::none(),
        "Opens a vault with the cheap checks: manifest (JSON text), paths, file_bytes, scout_bytes, total_bytes, "
        "records,\n"
        "record_bytes (of each MoE layer), record_offsets ([MoE layer][expert], in the .smoe). Raises CoreError.");
  m.def("verify", &verify, py::arg("path"), py::arg("progress") = py::none(),
        "Checks every byte of the three parts: {ok, checked_bytes, errors}. progress(done, total) may return False to "
        "stop.");
  m.def(
      "crc32c",
      [](const py::object& data, uint32_t init) {
        const Bytes bytes(data);
        py::gil_scoped_release release;
        return crc32c(bytes.data(), bytes.size(), init);
      },
      py::arg("data"), py::arg("init") = 0);
  m.def("record_layout", &layout, py::arg("hidden"), py::arg("width"), py::arg("gate"), py::arg("up"), py::arg("down"),
        py::arg("bias") = false,
        "Byte offsets in a record: {gate, up, down, end, length}; with biases gate_bias, up_bias, down_bias too.");
  m.def(
      "parse_manifest", [](const std::string& json) { (void)check(parse_manifest(json)); }, py::arg("json"),
      "Validates a manifest; raises CoreError naming the field.");
  m.def(
      "discard_parts", [](const std::string& dir, const std::string& stem) { check(discard_parts(dir, stem)); },
      py::arg("out_dir"), py::arg("stem"), "Removes what a stopped conversion left behind.");
  bind_writer(m);
}

}  // namespace smoe
