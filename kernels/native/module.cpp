// The Python module. Tensors arrive as addresses and sizes that afserve.kernels.native has checked; the GIL is
// free while an op runs.
#include <pybind11/pybind11.h>

#include <memory>

#include "bind.h"
#include "engine.h"

namespace {

// Keeps a Python object until the last copy goes, on whichever thread that is.
std::shared_ptr<void> held(py::object object) {
  return {new py::object(std::move(object)), [](void* one) {
            py::gil_scoped_acquire gil;
            delete static_cast<py::object*>(one);
          }};
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native CPU kernels. Use them through afserve.kernels.ops.";
  py::class_<Engine>(m, "Engine")
      .def(py::init<int, const std::string&>(), py::arg("threads"), py::arg("isa") = "")
      .def("borrow", [](Engine& e, Address bell, py::object memory) {
        e.borrow(bell ? LentCore(bell) : LentCore(), held(std::move(memory)));
      })
      .def_property_readonly("borrowed", [](const Engine& e) { return e.pool.borrowed(); })
      .def_property_readonly("isa", [](const Engine& e) { return e.isa->name; })
      .def_property_readonly("compacts", [](const Engine& e) { return e.isa->expand != nullptr; })
      .def_property_readonly("threads", [](const Engine& e) { return e.pool.threads(); });
  bind_weights(m);
  bind_ops(m);
  bind_indexer(m);
  bind_stack(m);  // before the layers, which give halves
  bind_states(m);
  bind_layer(m);
  bind_mla(m);
  bind_m2n(m);
  bind_blocks(m);
}
