// Binding of the fused attention half with a latent.
#include "bind.h"
#include "mla.h"

namespace {

struct BoundMla {
  MlaShape shape;
  Turn turn;
  Dtype dtype;
  MlaLayer layer;
};

struct Norms {
  Address input, q, latent, post;
};

template <class E>
MlaCall<E> call_of(const BoundMla& bound, const Batch& batch, const CachePair& cache, Address x, Address normed,
                   Address expert, Address weight) {
  Turn turn = bound.turn;
  turn.position = batch.position;
  const Place& place = cache.key_place;
  Store<E> latents{at<E>(cache.keys), place[0], place[1], place[2], 1, cache.key_size,
                   cache.blocks,      cache.block_size, layout_of(place)};
  return {at<E>(x), batch.tokens, turn, batch.slot, latents, at<E>(normed), at<int32_t>(expert), at<float>(weight)};
}

void run(const BoundMla& bound, Engine& engine, const Batch& batch, const CachePair& cache, Address x, Address normed,
         Address expert, Address weight) {
  py::gil_scoped_release released;
  if (bound.dtype == Dtype::f32)
    bound.layer.run(engine, call_of<float>(bound, batch, cache, x, normed, expert, weight), batch);
  else
    bound.layer.run(engine, call_of<bf16>(bound, batch, cache, x, normed, expert, weight), batch);
}

}  // namespace

void bind_mla(py::module_& m) {
  py::class_<MlaShape>(m, "MlaShape")
      .def(py::init([](int hidden, int heads, int nope, int rope, int value, int rank, float eps, float latent_eps,
                       float scale) {
        return MlaShape{hidden, heads, nope, rope, value, rank, eps, latent_eps, scale};
      }));
  py::class_<Norms>(m, "MlaNorms").def(py::init([](Address input, Address q, Address latent, Address post) {
    return Norms{input, q, latent, post};
  }));
  py::class_<MlaWeights>(m, "MlaWeights")
      .def(py::init([](const Norms& norms, std::shared_ptr<Linear> down, std::shared_ptr<Linear> q_up,
                       std::shared_ptr<HeadLinear> up_k, std::shared_ptr<HeadLinear> up_v, std::shared_ptr<Linear> out,
                       std::shared_ptr<Linear> gate, Address bias, const Rule& rule) {
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
                          rule};
      }));
  py::class_<BoundMla>(m, "MlaLayer")
      .def(py::init([](int dtype, const MlaShape& shape, const MlaWeights& weights, Address cos, Address sin,
                       int positions, bool interleaved) {
        Turn turn{at<float>(cos), at<float>(sin), nullptr, positions, shape.rope / 2, interleaved};
        return new BoundMla{shape, turn, dtype_of(dtype), MlaLayer(shape, weights)};
      }))
      .def("run", run);
}
