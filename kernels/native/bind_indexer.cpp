// Binding of the choice of rows.
#include "bind.h"
#include "indexer.h"
#include "near.h"

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
  // Addresses of the cache's rows, near ones, places, slots, last uses and counts; sizes: bytes of a row, places, slots.
  py::class_<NearRows>(m, "NearRows")
      .def(py::init([](const std::array<Address, 6>& of, const std::array<int64_t, 3>& sizes) {
        auto [row_bytes, capacity, slots] = sizes;
        return NearRows{at<const uint8_t>(of[0]), at<uint8_t>(of[1]), size_t(row_bytes), int(capacity), slots,
                        at<int32_t>(of[2]), at<int32_t>(of[3]), at<int64_t>(of[4]), at<int64_t>(of[5])};
      }))
      .def("fetch", [](const NearRows& near, Engine& engine, Address slot, Address count, size_t most, int tokens, Address place) {
        py::gil_scoped_release released;
        near.fetch(engine, at<int32_t>(slot), at<int32_t>(count), most, tokens, at<int32_t>(place));
      });
  // Addresses of queries, weights, keys and slots; sizes: heads, key, top, blocks, block size, tokens.
  m.def("choose_rows", [](Engine& engine, int dtype, const std::array<Address, 4>& of, const std::array<size_t, 2>& strides,
                          const Place& place, const std::array<int, 6>& sizes, int most, const Batch& batch) {
    (dtype_of(dtype) == Dtype::f32 ? choose<float> : choose<bf16>)(engine, of, strides, place, sizes, most, batch);
  });
}
