#include "linear.h"

namespace {

constexpr int ROW_BLOCK = 128;  // rows of one task: their sums, 32 KiB, stay near

}  // namespace

void Linear::pack(const Source& source) {
  weights_.pack(0, source, [this](int column) { return column < outputs_ ? column : -1; });
}

void Linear::set_bias(const Source& source) {
  bias_.assign(size_t(weights_.panels()) * PANEL, 0.0f);
  for (int i = 0; i < outputs_; i++) bias_[i] = source.at(0, i);
}

template <class E, class O>
void Linear::run(Engine& engine, const E* x, size_t stride, int rows, O* out, size_t out_stride) const {
  Rows<E> a = readable(x, stride, rows, inputs(), engine.shared[0]);
  const Isa& isa = *engine.isa;
  engine.reserve(ROW_BLOCK * PANEL * sizeof(float));
  int panels = weights_.panels();
  auto task = [&](int index, int worker) {
    int first = index / panels * ROW_BLOCK, panel = index % panels;
    int n = rows - first < ROW_BLOCK ? rows - first : ROW_BLOCK;
    float* sum = engine.scratch<float>(worker);
    weights_.multiply(isa, 0, panel, a.data + first * a.stride, a.stride, n, sum);
    int columns = outputs_ - panel * PANEL < PANEL ? outputs_ - panel * PANEL : PANEL;
    const float* bias = bias_.empty() ? nullptr : bias_.data() + panel * PANEL;
    isa.of<O>().store(sum, n, bias, out + first * out_stride + panel * PANEL, out_stride, columns);
  };
  engine.pool.run_within(ceil_div(rows, ROW_BLOCK) * panels, task);
}

template void Linear::run(Engine&, const bf16*, size_t, int, bf16*, size_t) const;
template void Linear::run(Engine&, const bf16*, size_t, int, float*, size_t) const;
template void Linear::run(Engine&, const float*, size_t, int, float*, size_t) const;
