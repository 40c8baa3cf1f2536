// Bindings of packed weights: dense maps and experts.
#include "bind.h"
#include "experts.h"
#include "linear.h"

using namespace pybind11::literals;

namespace {

Source source(Address data, int dtype, size_t stride) { return {at<const void>(data), dtype_of(dtype), stride}; }

Int4Source int4_source(Address codes, Address scales) { return {at<const int8_t>(codes), at<const float>(scales)}; }

GgmlType ggml_type(int number) {
  if (number < 0 || number >= GGML_TYPES) throw std::invalid_argument("type " + std::to_string(number));
  return static_cast<GgmlType>(number);
}

std::vector<GgmlType> ggml_types(const std::vector<int>& numbers) {
  std::vector<GgmlType> types;
  for (int number : numbers) types.push_back(ggml_type(number));
  return types;
}

void run_linear(const Linear& linear, Engine& engine, Address x, size_t stride, int rows, int dtype, Address out,
                int out_dtype) {
  py::gil_scoped_release released;
  size_t wide = size_t(linear.outputs());
  if (dtype_of(dtype) == Dtype::f32)
    linear.run(engine, at<float>(x), stride, rows, at<float>(out), wide);
  else if (dtype_of(out_dtype) == Dtype::f32)
    linear.run(engine, at<bf16>(x), stride, rows, at<float>(out), wide);
  else
    linear.run(engine, at<bf16>(x), stride, rows, at<bf16>(out), wide);
}

void run_experts(Experts& experts, Engine& engine, Address x, size_t stride, int dtype, Address slot, Address weight,
                 int rows, int choices, Address out, size_t out_stride, int out_dtype, bool add) {
  py::gil_scoped_release released;
  const int32_t* slots = at<const int32_t>(slot);
  const float* weights = at<const float>(weight);
  if (dtype_of(dtype) == Dtype::f32)
    experts.run(engine, at<float>(x), stride, slots, weights, rows, choices, at<float>(out), out_stride, add);
  else if (dtype_of(out_dtype) == Dtype::f32)
    experts.run(engine, at<bf16>(x), stride, slots, weights, rows, choices, at<float>(out), out_stride, add);
  else
    experts.run(engine, at<bf16>(x), stride, slots, weights, rows, choices, at<bf16>(out), out_stride, add);
}

}  // namespace

void bind_weights(py::module_& m) {
  py::class_<Groups>(m, "Groups").def(py::init([](int inputs, bool wide, bool e2m1) { return Groups{inputs, wide, e2m1}; }));
  py::class_<Linear, std::shared_ptr<Linear>>(m, "Linear")
      .def(py::init([](int outputs, int inputs, int dtype) { return new Linear(outputs, inputs, dtype_of(dtype)); }))
      .def(py::init([](int outputs, int inputs, const Groups& groups) {
        return new Linear(outputs, inputs, Dtype::i4, groups);
      }))
      .def(py::init([](int outputs, int inputs, const std::vector<int>& types) {
        return new Linear(outputs, inputs, ggml_types(types));
      }))
      .def("pack_ggml", [](Linear& l, Address rows, int first, int count) { l.pack_ggml(at<void>(rows), first, count); })
      .def("pack", [](Linear& l, Address w, int dtype, size_t stride) { l.pack(source(w, dtype, stride)); })
      .def("pack_int4", [](Linear& l, Address codes, Address scales) { l.pack_int4(int4_source(codes, scales)); })
      .def("set_bias", [](Linear& l, Address bias, int dtype) { l.set_bias(source(bias, dtype, 0)); })
      .def_property_readonly("bytes", &Linear::bytes)
      .def("run", run_linear);
  m.def("mlp", [](Engine& engine, const Linear& gate_up, const Linear& down, int dtype, Address x, size_t stride,
                  int rows, Address out) {
    py::gil_scoped_release released;
    if (dtype_of(dtype) == Dtype::f32)
      mlp(engine, gate_up, down, at<float>(x), stride, rows, at<float>(out));
    else
      mlp(engine, gate_up, down, at<bf16>(x), stride, rows, at<bf16>(out));
  });
  py::class_<HeadLinear, std::shared_ptr<HeadLinear>>(m, "HeadLinear")
      .def(py::init([](int heads, int outputs, int inputs, int dtype) {
        return new HeadLinear(heads, outputs, inputs, dtype_of(dtype));
      }))
      .def(py::init([](int heads, int outputs, int inputs, const Groups& groups) {
        return new HeadLinear(heads, outputs, inputs, Dtype::i4, groups);
      }))
      .def("pack",
           [](HeadLinear& l, int head, Address w, int dtype, size_t stride) { l.pack(head, source(w, dtype, stride)); })
      .def("pack_int4", [](HeadLinear& l, int head, Address codes, Address scales) {
        l.pack_int4(head, int4_source(codes, scales));
      })
      .def_property_readonly("bytes", &HeadLinear::bytes)
      .def("run", [](const HeadLinear& l, Engine& engine, int dtype, Address x, size_t token_stride,
                     size_t head_stride, int tokens, Address out) {
        py::gil_scoped_release released;
        size_t head = l.outputs(), token = l.heads() * head;
        if (dtype_of(dtype) == Dtype::f32)
          l.run(engine, at<float>(x), token_stride, head_stride, tokens, at<float>(out), token, head);
        else
          l.run(engine, at<bf16>(x), token_stride, head_stride, tokens, at<bf16>(out), token, head);
      });
  py::class_<Gating>(m, "Gating").def(py::init([](float limit, float alpha, bool bounded, bool squared, bool gelu) {
    return Gating{true, limit, alpha, bounded, squared, gelu};
  }));
  py::class_<Experts, std::shared_ptr<Experts>>(m, "Experts")
      .def(py::init([](int slots, int hidden, int inner, int dtype, bool bias, const Gating* gating, int places) {
        return new Experts(slots, hidden, inner, dtype_of(dtype), {}, bias, gating ? *gating : Gating{}, places);
      }), "slots"_a, "hidden"_a, "inner"_a, "dtype"_a, "bias"_a, "gating"_a, "places"_a = Panels::NOWHERE)
      .def(py::init([](int slots, int hidden, int inner, const Groups& groups, bool bias, const Gating* gating, int places) {
        return new Experts(slots, hidden, inner, Dtype::i4, groups, bias, gating ? *gating : Gating{}, places);
      }), "slots"_a, "hidden"_a, "inner"_a, "groups"_a, "bias"_a, "gating"_a, "places"_a = Panels::NOWHERE)
      .def(py::init([](int slots, int hidden, int inner, const std::array<int, 2>& types, bool bias, const Gating* gating,
                       int places) {
        return new Experts(slots, hidden, inner, ggml_type(types[0]), ggml_type(types[1]), bias, gating ? *gating : Gating{},
                           places);
      }), "slots"_a, "hidden"_a, "inner"_a, "types"_a, "bias"_a, "gating"_a, "places"_a = Panels::NOWHERE)
      .def("pack_ggml",
           [](Experts& e, int slot, Address gate_up, Address down) {
             py::gil_scoped_release released;
             e.pack_ggml(slot, at<void>(gate_up), at<void>(down));
           })
      .def("pack_fp8",
           [](Experts& e, int slot, Address gate_up, Address gate_up_scale, Address down, Address down_scale) {
             py::gil_scoped_release released;
             e.pack_fp8(slot, {at<const uint8_t>(gate_up), at<const float>(gate_up_scale), e.inner()},
                        {at<const uint8_t>(down), at<const float>(down_scale), e.hidden()});
           })
      .def("put", [](Experts& e, int slot, int place) { e.put(slot, place); })
      .def("set_bias",
           [](Experts& e, int slot, Address gate_up, Address down) { e.set_bias(slot, at<float>(gate_up), at<float>(down)); })
      .def("pack_int4",
           [](Experts& e, int slot, Address gate_up, Address gate_up_scale, Address down, Address down_scale) {
             py::gil_scoped_release released;
             e.pack_int4(slot, int4_source(gate_up, gate_up_scale), int4_source(down, down_scale));
           })
      .def("pack",
           [](Experts& e, int slot, Address gate_up, size_t gate_up_stride, Address down, size_t down_stride,
              int dtype, Address up) {
             py::gil_scoped_release released;
             Source both = source(gate_up, dtype, gate_up_stride);
             both.second = at<const void>(up), both.split = e.inner();
             e.pack(slot, both, source(down, dtype, down_stride));
           }, "slot"_a, "gate_up"_a, "gate_up_stride"_a, "down"_a, "down_stride"_a, "dtype"_a, "up"_a = 0)
      .def_property_readonly("bytes", &Experts::bytes)
      .def("run", run_experts);
}
