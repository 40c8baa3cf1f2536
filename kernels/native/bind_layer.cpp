// Binding of the fused attention half.
#include "bind.h"
#include "layer.h"

namespace {

LayerWeights weights(Address input_norm, Address q_norm, Address k_norm, Address post_norm,
                     std::shared_ptr<Linear> qkv, std::shared_ptr<Linear> out, std::shared_ptr<Linear> gate,
                     Address bias, const Rule& rule) {
  return {at<const void>(input_norm), at<const void>(q_norm), at<const void>(k_norm), at<const void>(post_norm),
          std::move(qkv), std::move(out), std::move(gate), at<const float>(bias), rule};
}

struct Arguments {
  Address x, normed, expert, weight;
};

template <class E>
LayerCall<E> call_of(const Arguments& a, const CachePair& cache, const LayerShape& shape, const Turn& turn,
                     const Batch& batch) {
  Turn now = turn;
  now.position = batch.position;
  auto store = [&](Address data, const Place& p) {
    return Store<E>{at<E>(data), p[0], p[1], p[2], shape.groups, shape.size, cache.blocks, cache.block_size, layout_of(p)};
  };
  return {at<E>(a.x), batch.tokens, now, batch.slot, store(cache.keys, cache.key_place),
          store(cache.values, cache.value_place),
          at<E>(a.normed), at<int32_t>(a.expert), at<float>(a.weight)};
}

struct BoundLayer {
  LayerShape shape;
  Turn turn;
  Dtype dtype;
  GqaLayer layer;
};

void run(const BoundLayer& bound, Engine& engine, const Batch& batch, const CachePair& cache, Address x, Address normed,
         Address expert, Address weight) {
  py::gil_scoped_release released;
  Arguments a{x, normed, expert, weight};
  if (bound.dtype == Dtype::f32)
    bound.layer.run(engine, call_of<float>(a, cache, bound.shape, bound.turn, batch), batch);
  else
    bound.layer.run(engine, call_of<bf16>(a, cache, bound.shape, bound.turn, batch), batch);
}

}  // namespace

void bind_layer(py::module_& m) {
  py::class_<LayerShape>(m, "LayerShape")
      .def(py::init([](int hidden, int heads, int groups, int size, float eps, float scale, int window) {
        return LayerShape{hidden, heads, groups, size, eps, scale, window};
      }));
  py::class_<LayerWeights>(m, "LayerWeights").def(py::init(&weights));
  py::class_<BoundLayer>(m, "GqaLayer")
      .def(py::init([](int dtype, const LayerShape& shape, const LayerWeights& weights, Address cos, Address sin,
                       int positions) {
        Turn turn{at<float>(cos), at<float>(sin), nullptr, positions, shape.size / 2, false};
        return new BoundLayer{shape, turn, dtype_of(dtype), GqaLayer(shape, weights)};
      }))
      .def("run", run);
}
