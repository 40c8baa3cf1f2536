// Bindings of attention halves over a cache, and of all layers in one call.
#include "bind.h"
#include "stack.h"

namespace {

// Addresses that the halves hold are the caller's to keep alive, as long as the stack. (layers, seconds, seconds waited)
py::tuple run_stack(const Stack& stack, Engine& engine, const std::vector<const Batch*>& groups, Address x, Address expert, Address bad,
                    Exchange* exchange, Address normed, Address weight) {
  auto run = [&](auto* rows) {
    using E = std::remove_pointer_t<decltype(rows)>;
    py::gil_scoped_release released;
    return stack.run(engine, groups, StackRows<E>{rows, at<int32_t>(expert), at<int32_t>(bad), at<E>(normed), at<float>(weight)},
                     exchange);
  };
  Stacked done = stack.dtype() == Dtype::f32 ? run(at<float>(x)) : run(at<bf16>(x));
  return py::make_tuple(done.layers, done.ffn_seconds, done.waited);
}

}  // namespace

void bind_stack(py::module_& m) {
  py::class_<AttentionHalf>(m, "AttentionHalf")
      .def("run", [](const AttentionHalf& half, Engine& engine, const Batch& batch, Address x, Address normed,
                     Address expert, Address weight) {
        py::gil_scoped_release released;
        half.run(engine, batch, {at<void>(x), at<void>(normed), at<int32_t>(expert), at<float>(weight)});
      });
  py::class_<StackLayer>(m, "StackLayer")
      .def(py::init([](const AttentionHalf& attention, std::shared_ptr<Linear> gate_up, std::shared_ptr<Linear> down,
                       std::shared_ptr<Experts> experts, bool away, int group) {
        return StackLayer{attention, std::move(gate_up), std::move(down), std::move(experts), away, group};
      }));
  py::class_<Stack>(m, "Stack").def(py::init<std::vector<StackLayer>>()).def("run", run_stack);
}
