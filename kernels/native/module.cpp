// The Python module. Tensors arrive as addresses and sizes that afserve.kernels.native has checked; the GIL is
// free while an op runs.
#include <pybind11/pybind11.h>

#include "bind.h"
#include "engine.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native CPU kernels. Use them through afserve.kernels.ops.";
  py::class_<Engine>(m, "Engine")
      .def(py::init<int, const std::string&>(), py::arg("threads"), py::arg("isa") = "")
      .def("borrow", [](Engine& e, Address bell, const py::object&) { e.borrow(LentCore(bell)); }, py::keep_alive<1, 3>())
      .def_property_readonly("borrowed", [](const Engine& e) { return e.pool.borrowed(); })
      .def_property_readonly("isa", [](const Engine& e) { return e.isa->name; })
      .def_property_readonly("compacts", [](const Engine& e) { return e.isa->expand != nullptr; })
      .def_property_readonly("threads", [](const Engine& e) { return e.pool.threads(); });
  bind_weights(m);
  bind_ops(m);
  bind_layer(m);
  bind_mla(m);
  bind_flags(m);
}
