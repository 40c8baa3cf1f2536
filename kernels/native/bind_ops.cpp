// Bindings of attention, rows and the router.
#include "attention.h"
#include "bind.h"
#include "delta.h"
#include "pointwise.h"
#include "router.h"
#include "rows.h"
#include "stream.h"

namespace {

// Calls work(E{}) with the element type of a dtype code, the GIL free.
template <class Work>
void with_dtype(int dtype, const Work& work) {
  Dtype d = dtype_of(dtype);
  py::gil_scoped_release released;
  if (d == Dtype::f32)
    work(float{});
  else
    work(bf16{});
}

template <class E>
Store<E> store_of(Address data, const Place& place, int size, const CachePair& c) {
  return {at<E>(data), place[0], place[1], place[2], c.groups, size, c.blocks, c.block_size, layout_of(place), c.bits};
}

void bind_attention(py::module_& m) {
  py::class_<Batch>(m, "Batch")
      .def(py::init([](Address query_start, Address context, Address table, size_t table_stride, int sequences,
                       Address position, Address slot, int tokens) {
        return Batch{at<int32_t>(query_start), at<int32_t>(context), at<int32_t>(table), table_stride,
                     sequences,                at<int64_t>(position), at<int64_t>(slot),  tokens};
      }));
  py::class_<CachePair>(m, "CachePair")
      .def(py::init([](Address keys, const Place& key_place, int key_size, Address values, const Place& value_place,
                       int value_size, int groups, int blocks, int block_size, int bits) {
        if (bits < 0 || bits > 2) throw std::invalid_argument("cache bits " + std::to_string(bits));
        return CachePair{keys, values, key_place, value_place, key_size, value_size, groups, blocks, block_size,
                         static_cast<Bits>(bits)};
      }))
      .def_readonly("value_size", &CachePair::value_size);
  m.def("attend", [](Engine& engine, int dtype, Address q, size_t q_token, size_t q_head, int heads, const CachePair& c,
                     float scale, int window, Address sinks, Address out, const Batch& batch) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      auto cache = [&](Address data, const Place& place, int size) {
        return Cache<E>{at<E>(data), place[0], place[1], place[2], size, layout_of(place), c.bits};
      };
      attend(engine, Attention<E>{at<E>(q), q_token, q_head, heads, c.groups, cache(c.keys, c.key_place, c.key_size),
                                  cache(c.values, c.value_place, c.value_size), c.blocks, c.block_size, scale, window,
                                  at<E>(out), at<const float>(sinks)}, batch);
    });
  });
}

void bind_delta(py::module_& m) {
  m.def("delta", [](Engine& engine, const std::array<int, 5>& sizes, int rule, Address conv, Address bias, Address skip,
                    Address mixed, Address decay, Address beta, Address out, Address state, size_t stride, int blocks,
                    int block_size, const Batch& batch) {
    DeltaNet net{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], DeltaRule(rule), at<float>(conv), at<float>(bias),
                 at<float>(skip)};
    py::gil_scoped_release released;
    delta(engine, net, {at<float>(mixed), at<float>(decay), at<float>(beta), at<float>(out)},
          {at<float>(state), stride, blocks, block_size}, batch);
  });
}

void bind_pointwise(py::module_& m) {
  m.def("open_rows", [](Engine& engine, int dtype, Address x, int rows, int heads, int size, Address gate, bool wide, bool softplus) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      size_t gates = size_t(heads) * (wide ? size : 1);
      open_rows(engine, at<E>(x), rows, heads, size, at<E>(gate), gates, wide, softplus ? Opening::softplus : Opening::sigmoid);
    });
  });
  m.def("join_rows", [](Engine& engine, int dtype, const Gating* gating, Address both, int rows, int inner, Address out) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      join_rows(engine, *gating, at<E>(both), rows, inner, at<E>(out));
    });
  });
  m.def("centre_rows", [](Engine& engine, int dtype, Address x, int rows, int size, Address weight, Address bias, float eps, Address out) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      centre_rows(engine, at<E>(x), rows, size, at<E>(weight), at<E>(bias), eps, at<E>(out));
    });
  });
  m.def("cap_rows", [](Engine& engine, Address x, int rows, int size, float cap) {
    py::gil_scoped_release released;
    cap_rows(engine, at<float>(x), rows, size, cap);
  });
}

void bind_rows(py::module_& m) {
  m.def("stream", [](Engine& engine, Address data, size_t bytes) {
    py::gil_scoped_release released;
    return stream(engine, at<void>(data), bytes);
  });
  m.def("prefer_huge_pages", [](Address data, size_t bytes) { prefer_huge_pages(at<void>(data), bytes); });
  m.def("rms_norm", [](Engine& engine, int dtype, Address x, size_t stride, int rows, int size, Address weight,
                       float eps, Address out) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      rms_norm(engine, at<E>(x), stride, rows, size, at<E>(weight), eps, at<E>(out));
    });
  });
  m.def("add_sums", [](Engine& engine, int dtype, Address x, int y_dtype, Address y, int rows, int size, Address bad,
                       int layer) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      if (y_dtype == dtype)
        add_sums(engine, at<E>(x), at<E>(y), rows, size, at<int32_t>(bad), layer);
      else
        add_sums(engine, at<E>(x), at<float>(y), rows, size, at<int32_t>(bad), layer);
    });
  });
  m.def("add_rms_norm", [](Engine& engine, int dtype, Address x, Address y, int rows, int size, Address weight,
                           float eps, Address out) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      add_rms_norm(engine, at<E>(x), at<E>(y), rows, size, at<E>(weight), eps, at<E>(out));
    });
  });
  m.def("gated", [](Engine& engine, int dtype, Address wide, int rows, int size, Address out) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      gated(engine, at<E>(wide), rows, size, at<E>(out));
    });
  });
  m.def("rope", [](Engine& engine, int dtype, Address x, size_t token_stride, size_t head_stride, int tokens,
                   int heads, Address cos, Address sin, Address position, int positions, int half, bool interleaved,
                   Address out) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      Turn turn{at<float>(cos), at<float>(sin), at<int64_t>(position), positions, half, interleaved};
      rope(engine, at<E>(x), token_stride, head_stride, tokens, heads, turn, at<E>(out));
    });
  });
  m.def("write_pairs", [](int dtype, Address k, Address v, int tokens, Address slot, const CachePair& c) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      write_pairs(at<E>(k), at<E>(v), tokens, at<int64_t>(slot), store_of<E>(c.keys, c.key_place, c.key_size, c),
                  store_of<E>(c.values, c.value_place, c.value_size, c));
    });
  });
  m.def("write_latents", [](int dtype, Address x, int tokens, Address slot, const CachePair& c) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      write_latents(at<E>(x), tokens, at<int64_t>(slot), store_of<E>(c.keys, c.key_place, c.key_size, c), c.value_size);
    });
  });
  m.def("write_cache", [](int dtype, Address x, size_t token_stride, size_t group_stride, int tokens, Address slot,
                          Address cache, const Place& place, int groups, int size, int blocks,
                          int block_size) {
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      Store<E> store{at<E>(cache), place[0], place[1], place[2], groups, size, blocks, block_size, layout_of(place)};
      write_cache(at<E>(x), token_stride, group_stride, tokens, at<int64_t>(slot), store);
    });
  });
}

void bind_router(py::module_& m) {
  py::class_<Rule>(m, "Rule")
      .def(py::init([](int top_k, int scoring, int selection, int groups, int top_groups, bool renormalise,
                       float epsilon, float scale, float closed_value) {
        return Rule{top_k, scoring, selection, groups, top_groups, renormalise, epsilon, scale, closed_value};
      }));
  m.def("argmax", [](Engine& engine, Address row, int rows, int size, Address index) {
    py::gil_scoped_release released;
    argmax(engine, at<float>(row), rows, size, at<int32_t>(index));
  });
  m.def("route", [](Engine& engine, int dtype, Address x, size_t stride, int tokens, Address gate, int gate_dtype,
                    int experts, int hidden, Address bias, const Rule& rule, Address expert, Address weight) {
    dtype_of(gate_dtype);
    with_dtype(dtype, [&](auto e) {
      using E = decltype(e);
      float* logits = engine.shared[1].at_least<float>(size_t(tokens) * experts);
      if (gate_dtype == dtype)
        router_logits(engine, at<E>(x), stride, tokens, at<E>(gate), experts, hidden, logits);
      else
        router_logits_widened(engine, at<E>(x), stride, tokens, at<float>(gate), experts, hidden, logits);
      choose(engine, logits, tokens, experts, at<float>(bias), rule, at<int32_t>(expert), at<float>(weight));
    });
  });
}

}  // namespace

void bind_ops(py::module_& m) {
  bind_attention(m);
  bind_delta(m);
  bind_pointwise(m);
  bind_rows(m);
  bind_router(m);
}
