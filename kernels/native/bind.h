// What the binding files share: addresses as integers, and the choice of element type from a dtype code.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "element.h"

namespace py = pybind11;
using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline Dtype dtype_of(int code) {
  if (code < 0 || code > 3) throw std::invalid_argument("dtype code " + std::to_string(code));
  return static_cast<Dtype>(code);
}

void bind_weights(py::module_& m);  // bind_weights.cpp
void bind_ops(py::module_& m);      // bind_ops.cpp
void bind_layer(py::module_& m);    // bind_layer.cpp
void bind_flags(py::module_& m);    // flags.cpp
