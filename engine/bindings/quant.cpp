// Encodings for Python: whole matrices in, whole matrices out, the GIL released while it works.
#include "quant/quant.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "quant/store.h"

namespace py = pybind11;

namespace smoe {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

std::vector<std::string> names() {
  std::vector<std::string> out;
  for (const Encoding e : all_encodings()) out.emplace_back(encoding_info(e).name);
  return out;
}

Encoding find_encoding(const std::string& name) {
  std::string known;
  for (const Encoding e : all_encodings()) {
    if (name == encoding_info(e).name) return e;
    if (!known.empty()) known += ' ';
    known += encoding_info(e).name;
  }
  raise(Status(Code::usage, "unknown encoding '" + name + "'", "one of: " + known));
}

Layout find_layout(const std::string& name) {
  if (name == "rows") return Layout::rows;
  if (name == "panel16") return Layout::panel16;
  raise(Status(Code::usage, "unknown layout '" + name + "'", "rows or panel16"));
}

void check_cols(Encoding e, uint64_t cols) {
  if (cols > 0 && row_bytes(e, cols) > 0) return;
  raise(Status(Code::usage,
               "rows of " + std::to_string(cols) + " values do not divide into blocks of " + encoding_info(e).name,
               "see fallback()"));
}

// The size a [rows, cols] matrix takes; refuses shapes whose size does not fit 63 bits.
uint64_t checked_size(Encoding e, Layout layout, uint64_t rows, uint64_t cols) {
  check_cols(e, cols);
  if (rows > (uint64_t{1} << 40) || cols > (uint64_t{1} << 40) ||
      static_cast<double>(rows + kPanelRows) * static_cast<double>(cols) * 4.0 > 9e18) {
    raise(Status(Code::usage, "a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " is too large"));
  }
  return stored_bytes(e, layout, rows, cols);
}

// A contiguous read-only view of any buffer, with the size it must have.
class Bytes {
 public:
  Bytes(const py::buffer& buffer, uint64_t expected) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw py::error_already_set();
    if (static_cast<uint64_t>(view_.len) != expected) {
      const uint64_t got = static_cast<uint64_t>(view_.len);
      PyBuffer_Release(&view_);
      raise(Status(Code::usage, "expected " + std::to_string(expected) + " bytes, got " + std::to_string(got)));
    }
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }

 private:
  Py_buffer view_ = {};
};

// New bytes of `size`, filled by f(uint8_t*) without the GIL.
template <class F>
py::bytes fill_bytes(uint64_t size, F&& f) {
  auto out = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!out) throw py::error_already_set();
  auto* data = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr()));
  py::gil_scoped_release unlocked;
  f(data);
  return out;
}

// Null or [cols], finite and not negative.
const float* checked_importance(const std::optional<FloatArray>& importance, uint64_t cols) {
  if (!importance) return nullptr;
  if (importance->ndim() != 1 || static_cast<uint64_t>(importance->shape(0)) != cols) {
    raise(Status(Code::usage, "importance takes one weight for each of the " + std::to_string(cols) + " columns"));
  }
  for (uint64_t k = 0; k < cols; ++k) {
    const float w = importance->data()[k];
    if (!(w >= 0) || !std::isfinite(w)) raise(Status(Code::usage, "importance weights are finite and not negative"));
  }
  return importance->data();
}

py::bytes encode(const std::string& name, const FloatArray& array, const std::optional<FloatArray>& importance,
                 const std::string& rule_name) {
  if (rule_name != "mlx-gpu" && rule_name != "mlx-cpu") {
    raise(Status(Code::usage, "unknown rule '" + rule_name + "'", "mlx-gpu or mlx-cpu"));
  }
  const MlxRule rule = rule_name == "mlx-cpu" ? MlxRule::cpu : MlxRule::gpu;
  const Encoding e = find_encoding(name);
  if (array.ndim() != 2) raise(Status(Code::usage, "encode takes a two-dimensional array [rows, cols]"));
  const auto rows = static_cast<uint64_t>(array.shape(0)), cols = static_cast<uint64_t>(array.shape(1));
  const uint64_t size = checked_size(e, Layout::rows, rows, cols);
  Status status;
  const float* src = array.data();
  const float* weights = checked_importance(importance, cols);
  py::bytes out = fill_bytes(size, [&](uint8_t* dst) { status = encode_rows(e, src, rows, cols, dst, weights, rule); });
  check(status);
  return out;
}

FloatArray decode(const std::string& name, const py::buffer& data, uint64_t rows, uint64_t cols,
                  const std::string& layout_name) {
  const Encoding e = find_encoding(name);
  const Layout layout = find_layout(layout_name);
  const Bytes bytes(data, checked_size(e, layout, rows, cols));
  FloatArray out({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(cols)});
  float* dst = out.mutable_data();
  py::gil_scoped_release unlocked;
  for (uint64_t r = 0; r < rows; ++r) decode_row(e, layout, bytes.data(), rows, cols, r, dst + r * cols);
  return out;
}

using Repack = void (*)(Encoding, const uint8_t*, uint64_t, uint64_t, uint8_t*);

py::bytes repack(const std::string& name, const py::buffer& data, uint64_t rows, uint64_t cols, Layout from, Layout to,
                 Repack function) {
  const Encoding e = find_encoding(name);
  if (encoding_info(e).plain) from = to = Layout::rows;
  const Bytes bytes(data, checked_size(e, from, rows, cols));
  return fill_bytes(stored_bytes(e, to, rows, cols), [&](uint8_t* dst) { function(e, bytes.data(), rows, cols, dst); });
}

// A writable buffer, of which `bytes` are used from `offset` on.
class Target {
 public:
  Target(const py::buffer& buffer, uint64_t offset, uint64_t bytes) : offset_(offset) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_WRITABLE) != 0) throw py::error_already_set();
    const uint64_t size = static_cast<uint64_t>(view_.len);
    if (offset > size || bytes > size - offset) {
      PyBuffer_Release(&view_);
      raise(Status(Code::usage, std::to_string(bytes) + " bytes do not fit at " + std::to_string(offset) + " of " +
                                    std::to_string(size)));
    }
  }
  ~Target() { PyBuffer_Release(&view_); }
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf) + offset_; }

 private:
  Py_buffer view_ = {};
  uint64_t offset_;
};

std::pair<double, double> store(const std::string& from_name, const py::buffer& data, uint64_t rows, uint64_t cols,
                                const std::string& to_name, const std::string& layout_name, const py::buffer& target,
                                uint64_t offset, const std::optional<FloatArray>& importance) {
  const Encoding from = find_encoding(from_name), to = find_encoding(to_name);
  const Layout layout = find_layout(layout_name);
  if (from != to && !encoding_info(from).plain) {
    raise(Status(Code::usage, from_name + " is kept or decoded, not encoded again"));
  }
  const Bytes source(data, checked_size(from, Layout::rows, rows, cols));
  const Target out(target, offset, checked_size(to, layout, rows, cols));
  const float* weights = checked_importance(importance, cols);
  StoreSums sums;
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = store_rows(from, source.data(), rows, cols, to, layout, out.data(), weights, &sums);
  }
  check(status);
  return {sums.error, sums.norm};
}

}  // namespace

void bind_quant(py::module_& m) {
  m.def("encodings", &names, "Names of the encodings a weight can be stored in.");
  m.def("encode", &encode, py::arg("name"), py::arg("array"), py::arg("importance") = py::none(),
        py::arg("rule") = "mlx-gpu",
        "float32 [rows, cols] -> bytes in rows layout. A non-finite value is a CoreError naming its flat index.");
  m.def("decode", &decode, py::arg("name"), py::arg("data"), py::arg("rows"), py::arg("cols"),
        py::arg("layout") = "rows", "Stored bytes -> float32 [rows, cols].");
  m.def(
      "pack",
      [](const std::string& name, const py::buffer& data, uint64_t rows, uint64_t cols) {
        return repack(name, data, rows, cols, Layout::rows, Layout::panel16, pack_panels);
      },
      py::arg("name"), py::arg("data"), py::arg("rows"), py::arg("cols"),
      "rows layout -> panel16 (a copy for plain encodings).");
  m.def(
      "unpack",
      [](const std::string& name, const py::buffer& data, uint64_t rows, uint64_t cols) {
        return repack(name, data, rows, cols, Layout::panel16, Layout::rows, unpack_panels);
      },
      py::arg("name"), py::arg("data"), py::arg("rows"), py::arg("cols"), "panel16 -> rows layout, exactly.");
  m.def("store", &store, py::arg("source"), py::arg("data"), py::arg("rows"), py::arg("cols"), py::arg("name"),
        py::arg("layout"), py::arg("target"), py::arg("offset"), py::arg("importance") = py::none(),
        "Rows in the plain encoding `source`, or in `name` itself, into a writable buffer at `offset`, as `name` in a\n"
        "layout; (squared error, squared norm), not finite where a value is not. Errors as encode's.");
  m.def(
      "stored_bytes",
      [](const std::string& name, const std::string& layout, uint64_t rows, uint64_t cols) {
        return checked_size(find_encoding(name), find_layout(layout), rows, cols);
      },
      py::arg("name"), py::arg("layout"), py::arg("rows"), py::arg("cols"), "Bytes a matrix takes as stored.");
  m.def(
      "fallback",
      [](const std::string& name, uint64_t cols) {
        return encoding_info(fallback_encoding(find_encoding(name), cols)).name;
      },
      py::arg("name"), py::arg("cols"), "The encoding to use where rows of `cols` values do not divide into blocks.");
}

}  // namespace smoe
