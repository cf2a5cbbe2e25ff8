#include "bindings/bindings.h"

namespace py = pybind11;

namespace smoe {
namespace {

// Owned by the module for the life of the interpreter.
PyObject* core_error = nullptr;

const char* code_name(Code code) {
  switch (code) {
    case Code::ok:
      return "ok";
    case Code::failed:
      return "failed";
    case Code::usage:
      return "usage";
    case Code::resources:
      return "resources";
    case Code::corrupt:
      return "corrupt";
    case Code::io:
      return "io";
    case Code::cancelled:
      return "cancelled";
  }
  return "failed";
}

}  // namespace

void bind_errors(py::module_& m) {
  core_error = PyErr_NewException("smoe_cli._core.CoreError", PyExc_RuntimeError, nullptr);
  m.attr("CoreError") = py::reinterpret_borrow<py::object>(core_error);
}

void raise(const Status& status) {
  py::object error = py::reinterpret_borrow<py::object>(core_error)(status.message());
  error.attr("code") = code_name(status.code());
  error.attr("hint") = status.hint();
  PyErr_SetObject(core_error, error.ptr());
  throw py::error_already_set();
}

}  // namespace smoe
