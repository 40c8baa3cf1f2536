// Binding of the choice of rows.
#include "bind.h"
#include "indexer.h"

namespace {

template <class E>
void choose(Engine& engine, const std::array<Address, 4>& of, const std::array<size_t, 2>& strides, const Place& place,
            const std::array<int, 6>& sizes, int most, const Batch& batch) {
  auto [heads, size, top, blocks, block_size, tokens] = sizes;
  if (tokens != batch.tokens) throw std::invalid_argument("q_TJI: not as many tokens as the batch has");
  Cache<E> keys{at<E>(of[2]), place[0], place[1], place[2], size, layout_of(place)};
  py::gil_scoped_release released;
  choose_rows(engine, IndexQueries<E>{at<E>(of[0]), strides[0], strides[1], at<float>(of[1]), heads, top, keys, blocks,
                                      block_size, at<int32_t>(of[3]), most},
              batch);
}

}  // namespace

void bind_indexer(py::module_& m) {
  // Addresses of queries, weights, keys and slots; sizes: heads, key, top, blocks, block size, tokens.
  m.def("choose_rows", [](Engine& engine, int dtype, const std::array<Address, 4>& of, const std::array<size_t, 2>& strides,
                          const Place& place, const std::array<int, 6>& sizes, int most, const Batch& batch) {
    (dtype_of(dtype) == Dtype::f32 ? choose<float> : choose<bf16>)(engine, of, strides, place, sizes, most, batch);
  });
}
