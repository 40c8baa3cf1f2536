// What the binding files share: the choice of element type from a dtype code, and where caches lie.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>

#include "address.h"
#include "eight.h"
#include "tiles.h"

namespace py = pybind11;

inline Dtype dtype_of(int code) {
  if (code < 0 || code > int(Dtype::fp8) || code == int(Dtype::ggml)) throw std::invalid_argument("dtype code " + std::to_string(code));
  return static_cast<Dtype>(code);
}

// A paged cache: strides of blocks, heads and tokens in elements, and the code of its layout.
using Place = std::array<size_t, 4>;

inline Layout layout_of(const Place& place) {
  if (place[3] > 2) throw std::invalid_argument("cache layout " + std::to_string(place[3]));
  return static_cast<Layout>(place[3]);
}

// The two caches of a layer, or one twice where values are a part of keys.
struct CachePair {
  Address keys, values;
  Place key_place, value_place;
  int key_size, value_size, groups, blocks, block_size;
  Bits bits;
};

void bind_weights(py::module_& m);  // bind_weights.cpp
void bind_ops(py::module_& m);      // bind_ops.cpp
void bind_indexer(py::module_& m);  // bind_indexer.cpp
void bind_layer(py::module_& m);    // bind_layer.cpp
void bind_mla(py::module_& m);      // bind_mla.cpp
void bind_stack(py::module_& m);    // bind_stack.cpp
void bind_states(py::module_& m);   // bind_states.cpp
void bind_m2n(py::module_& m);      // bind_m2n.cpp
void bind_blocks(py::module_& m);   // blocks.cpp
