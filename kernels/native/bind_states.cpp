// Bindings of halves with states, and of a convolution alone.
#include "bind.h"
#include "states.h"

namespace {

struct TypedHalf {
  StateHalf half;
  Dtype dtype;
};

// What is told of a mixer: addresses of float weights (convolution, bias, skip, rate, step, bias behind the taps), and its norm's.
struct MixerArrays {
  Address conv, bias, skip, rate, step, behind, norm;
};

template <class E>
AttentionHalf bound(std::shared_ptr<TypedHalf> of, const States& states) {
  return {of->dtype, of->half.hidden(), of->half.top_k(),
          [=](Engine& engine, const Batch& batch, const HalfRows& rows) { of->half.run<E>(engine, states, batch, rows); }};
}

AttentionHalf over(std::shared_ptr<TypedHalf> of, Address data, size_t stride, int blocks, int block_size) {
  States states{at<float>(data), stride, blocks, block_size};
  return of->dtype == Dtype::f32 ? bound<float>(of, states) : bound<bf16>(of, states);
}

template <class Work>
void with_rows(const TypedHalf& of, const Work& work) {
  py::gil_scoped_release released;
  if (of.dtype == Dtype::f32)
    work(float{});
  else
    work(bf16{});
}

}  // namespace

void bind_states(py::module_& m) {
  py::class_<MixerArrays>(m, "MixerArrays")
      .def(py::init([](Address conv, Address bias, Address skip, Address rate, Address step, Address behind, Address norm) {
        return MixerArrays{conv, bias, skip, rate, step, behind, norm};
      }));
  py::class_<MixerWeights>(m, "MixerWeights")
      .def(py::init([](int kind, const std::array<int, 5>& sizes, std::shared_ptr<Linear> down, std::shared_ptr<Linear> forget,
                       std::shared_ptr<Linear> open, std::shared_ptr<Linear> out, const MixerArrays& a, float floor, int norm_groups) {
        if (kind < 0 || kind > int(MixerKind::none)) throw std::invalid_argument("kind of mixer " + std::to_string(kind));
        DeltaNet net{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], DeltaRule(kind % 3), at<float>(a.conv), at<float>(a.bias), at<float>(a.skip)};
        return MixerWeights{MixerKind(kind), net, std::move(down), std::move(forget), std::move(open), std::move(out), at<float>(a.rate),
                            at<float>(a.step), at<float>(a.behind), at<void>(a.norm), floor, norm_groups};
      }));
  py::class_<TypedHalf, std::shared_ptr<TypedHalf>>(m, "StateHalf")
      .def(py::init([](int dtype, int hidden, float eps, Address input_norm, Address post_norm, const MixerWeights& mixer,
                       std::shared_ptr<Linear> gate, Address bias, const Rule& rule) {
        StateWeights weights{hidden, eps, at<void>(input_norm), at<void>(post_norm), mixer, std::move(gate), at<float>(bias), rule};
        return new TypedHalf{StateHalf(weights), dtype_of(dtype)};
      }))
      .def("over", over)
      .def("begin", [](const TypedHalf& of, Engine& engine, Address x, int tokens, Address mixed, Address decay, Address beta, Address gate) {
        with_rows(of, [&](auto e) {
          using E = decltype(e);
          of.half.begin<E>(engine, at<E>(x), tokens, {at<float>(mixed), at<float>(decay), at<float>(beta), at<E>(gate)});
        });
      })
      .def("end", [](const TypedHalf& of, Engine& engine, Address x, int tokens, Address read, Address gate, Address normed, Address expert,
                     Address weight) {
        with_rows(of, [&](auto e) {
          using E = decltype(e);
          of.half.end<E>(engine, at<E>(x), tokens, at<float>(read), at<E>(gate),
                         {at<void>(x), at<void>(normed), at<int32_t>(expert), at<float>(weight)});
        });
      });
  m.def("convolve", [](Engine& engine, int channels, int taps, Address conv, Address x, Address out, Address state, size_t stride,
                       int blocks, int block_size, const Batch& batch) {
    DeltaNet net{0, channels, 0, 1, taps, DeltaRule::sum, at<float>(conv), nullptr, nullptr};
    py::gil_scoped_release released;
    convolve(engine, net, at<float>(x), at<float>(out), {at<float>(state), stride, blocks, block_size}, batch);
  });
}
