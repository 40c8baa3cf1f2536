// Binding of the fused attention half with a latent.
#include <optional>

#include "bind.h"
#include "half.h"
#include "mla.h"

namespace {

struct TurningMla {
  MlaShape shape;
  Turn turn;
  Dtype dtype;
  int top_k;
  MlaLayer layer;
};

struct Norms {
  Address input, q, latent, post;
};

template <class E>
void run(const TurningMla& of, const CachePair& cache, const std::optional<CachePair>& index, const std::optional<NearRows>& near,
         Engine& engine, const Batch& batch, const HalfRows& rows) {
  Turn turn = of.turn;
  turn.position = batch.position;
  auto store = [](const CachePair& of) {
    const Place& place = of.key_place;
    return Store<E>{at<E>(of.keys), place[0], place[1], place[2], 1, of.key_size, of.blocks, of.block_size, layout_of(place),
                    of.bits};
  };
  MlaCall<E> call{static_cast<E*>(rows.x), batch.tokens, turn, batch.slot, store(cache), index ? store(*index) : Store<E>{},
                  static_cast<E*>(rows.normed), rows.expert, rows.weight, rows.slot, rows.most,
                  near ? &*near : nullptr};
  of.layer.run(engine, call, batch);
}

// `index`: the cache of its indexer's keys, if it has one. `near`: rows of `cache` that attention reads in its place.
AttentionHalf over(std::shared_ptr<TurningMla> of, const CachePair& cache, const std::optional<CachePair>& index,
                   const std::optional<NearRows>& near) {
  auto run_one = of->dtype == Dtype::f32 ? run<float> : run<bf16>;
  return {of->dtype, of->shape.hidden, of->top_k,
          [=](Engine& engine, const Batch& batch, const HalfRows& rows) { run_one(*of, cache, index, near, engine, batch, rows); }};
}

}  // namespace

void bind_mla(py::module_& m) {
  py::class_<MlaShape>(m, "MlaShape")
      .def(py::init([](int hidden, int heads, int nope, int rope, int value, int rank, float eps, float latent_eps,
                       float scale, int top, bool interleaved, bool reuses) {
        return MlaShape{hidden, heads, nope, rope, value, rank, eps, latent_eps, scale, {top, interleaved}, reuses};
      }));
  py::class_<Norms>(m, "MlaNorms").def(py::init([](Address input, Address q, Address latent, Address post) {
    return Norms{input, q, latent, post};
  }));
  py::class_<IndexerWeights>(m, "IndexerWeights")
      .def(py::init([](std::shared_ptr<Linear> queries, std::shared_ptr<Linear> keys, std::shared_ptr<Linear> weights,
                       Address norm, Address bias) {
        return IndexerWeights{std::move(queries), std::move(keys), std::move(weights), at<const void>(norm), at<const void>(bias)};
      }));
  py::class_<MlaWeights>(m, "MlaWeights")
      .def(py::init([](const Norms& norms, std::shared_ptr<Linear> down, std::shared_ptr<Linear> q_up,
                       std::shared_ptr<HeadLinear> up_k, std::shared_ptr<HeadLinear> up_v, std::shared_ptr<Linear> out,
                       std::shared_ptr<Linear> gate, Address bias, const Rule& rule, const IndexerWeights* index, const HalfSteps* steps) {
        return MlaWeights{at<const void>(norms.input),
                          at<const void>(norms.q),
                          at<const void>(norms.latent),
                          at<const void>(norms.post),
                          std::move(down),
                          std::move(q_up),
                          std::move(up_k),
                          std::move(up_v),
                          std::move(out),
                          std::move(gate),
                          at<const float>(bias),
                          rule,
                          index ? *index : IndexerWeights{},
                          steps ? *steps : HalfSteps{}};
      }));
  py::class_<TurningMla, std::shared_ptr<TurningMla>>(m, "MlaLayer")
      .def(py::init([](int dtype, const MlaShape& shape, const MlaWeights& weights, Address cos, Address sin,
                       int positions, bool interleaved) {
        Turn turn{at<float>(cos), at<float>(sin), nullptr, positions, shape.rope / 2, interleaved};
        int top_k = weights.gate || weights.steps.wide_gate ? weights.rule.top_k : 0;
        return new TurningMla{shape, turn, dtype_of(dtype), top_k, MlaLayer(shape, weights)};
      }))
      .def("over", over, py::arg("cache"), py::arg("index"), py::arg("near") = std::nullopt);
}
