// Binding of the fused attention half.
#include "bind.h"
#include "half.h"
#include "layer.h"

namespace {

LayerWeights weights(Address input_norm, Address q_norm, Address k_norm, Address post_norm,
                     std::shared_ptr<Linear> qkv, std::shared_ptr<Linear> out, std::shared_ptr<Linear> gate,
                     Address bias, Address sinks, const Rule& rule, const HalfSteps* steps) {
  return {at<const void>(input_norm), at<const void>(q_norm), at<const void>(k_norm), at<const void>(post_norm),
          std::move(qkv), std::move(out), std::move(gate), at<const float>(bias), at<const float>(sinks),
          rule, steps ? *steps : HalfSteps{}};
}

struct TurningLayer {
  LayerShape shape;
  Turn turn;
  Dtype dtype;
  int top_k;
  GqaLayer layer;
};

template <class E>
void run(const TurningLayer& of, const CachePair& cache, Engine& engine, const Batch& batch, const HalfRows& rows) {
  Turn turn = of.turn;
  turn.position = batch.position;
  auto store = [&](Address data, const Place& p) {
    return Store<E>{at<E>(data), p[0], p[1], p[2], of.shape.groups, of.shape.size, cache.blocks, cache.block_size,
                    layout_of(p), cache.bits};
  };
  LayerCall<E> call{static_cast<E*>(rows.x), batch.tokens, turn, batch.slot, store(cache.keys, cache.key_place),
                    store(cache.values, cache.value_place), static_cast<E*>(rows.normed), rows.expert, rows.weight};
  of.layer.run(engine, call, batch);
}

AttentionHalf over(std::shared_ptr<TurningLayer> of, const CachePair& cache) {
  auto run_one = of->dtype == Dtype::f32 ? run<float> : run<bf16>;
  return {of->dtype, of->shape.hidden, of->top_k,
          [=](Engine& engine, const Batch& batch, const HalfRows& rows) { run_one(*of, cache, engine, batch, rows); }};
}

}  // namespace

void bind_layer(py::module_& m) {
  py::class_<HalfSteps>(m, "HalfSteps")
      .def(py::init([](std::shared_ptr<Linear> opening, bool softplus, bool parallel, bool centred, float clip,
                       const std::array<Address, 5>& norms, const std::array<Address, 3>& floats, int experts) {
        return HalfSteps{std::move(opening), softplus, parallel, clip, at<void>(norms[0]), at<void>(norms[1]), at<void>(norms[2]),
                         at<float>(floats[0]), at<float>(floats[1]), at<float>(floats[2]), experts, centred, at<void>(norms[3]),
                         at<void>(norms[4])};
      }));
  py::class_<LayerShape>(m, "LayerShape")
      .def(py::init([](int hidden, int heads, int groups, int size, float eps, float scale, int window, bool wide, bool late) {
        return LayerShape{hidden, heads, groups, size, eps, scale, window, wide, late};
      }));
  py::class_<LayerWeights>(m, "LayerWeights").def(py::init(&weights));
  py::class_<TurningLayer, std::shared_ptr<TurningLayer>>(m, "GqaLayer")
      .def(py::init([](int dtype, const LayerShape& shape, const LayerWeights& weights, Address cos, Address sin,
                       int positions) {
        Turn turn{at<float>(cos), at<float>(sin), nullptr, positions, shape.size / 2, false};
        int top_k = weights.gate || weights.steps.wide_gate ? weights.rule.top_k : 0;
        return new TurningLayer{shape, turn, dtype_of(dtype), top_k, GqaLayer(shape, weights)};
      }))
      .def("over", over);
}
