// Bindings of attention halves over a cache, and of all layers in one call.
#include "bind.h"
#include "decoder.h"
#include "predictor.h"
#include "stack.h"

namespace {

// Addresses that the halves hold are the caller's to keep alive, as long as the stack. (layers, seconds, seconds waited)
py::tuple run_stack(const Stack& stack, Engine& engine, const std::vector<const Batch*>& groups, Address x, Address expert, Address bad,
                    Exchange* exchange, Address normed, Address weight, Address slot, int most) {
  auto run = [&](auto* rows) {
    using E = std::remove_pointer_t<decltype(rows)>;
    py::gil_scoped_release released;
    return stack.run(engine, groups, StackRows<E>{rows, at<int32_t>(expert), at<int32_t>(bad), at<E>(normed), at<float>(weight), at<int32_t>(slot), most},
                     exchange);
  };
  Stacked done = stack.dtype() == Dtype::f32 ? run(at<float>(x)) : run(at<bf16>(x));
  return py::make_tuple(done.layers, done.ffn_seconds, done.waited);
}

// `ends` (3, S): row, place and most of DraftRows. (S, deepest) of tokens and likelihoods; rows that the layer computed.
int draft(const Predictor& predictor, Engine& engine, const Batch& batch, Address token, Address hidden, Address ends,
          int deepest, float least, int block_size, Address drafted, Address likely, Address expert) {
  auto run = [&](const auto* rows) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
    py::gil_scoped_release released;
    const int32_t* row = at<int32_t>(ends);
    const int32_t *place = row + batch.sequences, *most = place + batch.sequences;
    return predictor.draft(engine, batch, DraftRows<E>{at<int64_t>(token), rows, row, place, most, deepest, least, block_size,
                                                       at<int32_t>(drafted), at<float>(likely), at<int32_t>(expert)});
  };
  return predictor.dtype() == Dtype::f32 ? run(at<const float>(hidden)) : run(at<const bf16>(hidden));
}

// (passes, seconds, whether one more was spoiled)
py::tuple decode(const Decoder& decoder, Engine& engine, const std::vector<const Batch*>& groups, const std::vector<int>& block_sizes,
                 Address token, int passes, const std::vector<std::vector<int>>& stops, Address drawn, Address expert) {
  DecodeRows rows{at<int64_t>(token), passes, stops, block_sizes, at<int32_t>(drawn), at<int32_t>(expert)};
  Decoded done;
  {
    py::gil_scoped_release released;
    done = decoder.dtype() == Dtype::f32 ? decoder.decode<float>(engine, groups, rows) : decoder.decode<bf16>(engine, groups, rows);
  }
  return py::make_tuple(done.passes, done.ffn_seconds, done.spoiled);
}

}  // namespace

void bind_stack(py::module_& m) {
  py::class_<AttentionHalf>(m, "AttentionHalf")
      .def("run", [](const AttentionHalf& half, Engine& engine, const Batch& batch, Address x, Address normed,
                     Address expert, Address weight, Address slot, int most) {
        py::gil_scoped_release released;
        half.run(engine, batch,
                 {at<void>(x), at<void>(normed), at<int32_t>(expert), at<float>(weight), at<int32_t>(slot), most});
      });
  py::class_<FfnSteps>(m, "FfnSteps")
      .def(py::init([](std::shared_ptr<Linear> opening, const Gating* gating, float scale, float row_scale, float eps,
                       const std::array<Address, 4>& norms) {
        return FfnSteps{std::move(opening), gating != nullptr, gating ? *gating : Gating{}, scale, row_scale, eps,
                        at<void>(norms[0]), at<void>(norms[1]), at<void>(norms[2]), at<void>(norms[3])};
      }));
  py::class_<StackLayer>(m, "StackLayer")
      .def(py::init([](const AttentionHalf& attention, std::shared_ptr<Linear> gate_up, std::shared_ptr<Linear> down,
                       std::shared_ptr<Experts> experts, bool away, int group, const FfnSteps* steps) {
        return StackLayer{attention, std::move(gate_up), std::move(down), std::move(experts), away, group, steps ? *steps : FfnSteps{}};
      }));
  py::class_<Stack, std::shared_ptr<Stack>>(m, "Stack").def(py::init<std::vector<StackLayer>>()).def("run", run_stack);
  py::class_<Embedding>(m, "Embedding")
      .def(py::init([](Address data, int rows, int size, int type) {
        if (type < Embedding::NUMBERS || type >= GGML_TYPES) throw std::invalid_argument("type " + std::to_string(type));
        return Embedding{at<void>(data), rows, size, type};
      }))
      .def("read", [](const Embedding& from, Engine& engine, int dtype, Address token, int count, Address out) {
        py::gil_scoped_release released;
        if (dtype_of(dtype) == Dtype::f32) return from.read(engine, at<int64_t>(token), count, at<float>(out));
        from.read(engine, at<int64_t>(token), count, at<bf16>(out));
      });
  py::class_<Predictor>(m, "Predictor")
      .def(py::init([](std::shared_ptr<Stack> layer, const Embedding& embed, Address embedding_norm, Address hidden_norm,
                       Address last_norm, float eps, float logit_scale, std::shared_ptr<Linear> join, std::shared_ptr<Linear> head) {
        PredictorParts parts{embed, at<void>(embedding_norm), at<void>(hidden_norm), at<void>(last_norm),
                             eps, logit_scale, std::move(join), std::move(head)};
        return Predictor(std::move(parts), std::move(layer));
      }))
      .def("draft", draft);
  py::class_<Decoder>(m, "Decoder")
      .def(py::init([](std::shared_ptr<Stack> layers, const Embedding& embed, Address last_norm, Address last_bias, bool centred,
                       float eps, const std::array<float, 3>& scales, int top, std::shared_ptr<Linear> head) {
        return Decoder({embed, at<void>(last_norm), at<void>(last_bias), centred, eps, scales[0], scales[1], scales[2],
                        top, std::move(head)},
                       std::move(layers));
      }))
      .def("decode", decode);
}
