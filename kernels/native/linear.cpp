#include "linear.h"

#include <algorithm>

#include "rows.h"

namespace {

constexpr int ROW_BLOCK = 128;  // rows of one task: their sums, 32 KiB, stay near

}  // namespace

void Linear::pack(const Source& source) {
  weights_.pack(0, source, [this](int column) { return column < outputs_ ? column : -1; });
}

void Linear::pack_int4(const Int4Source& source) {
  weights_.pack_int4(0, source, [this](int column) { return column < outputs_ ? column : -1; });
}

void Linear::pack_ggml(const void* rows, int first, int count) {
  if (first < 0 || count < 0 || first + count > outputs_) throw std::out_of_range("rows past the last output");
  weights_.pack_ggml(0, rows, [=](int column) { return column >= first && column < first + count ? column - first : -1; });
}

void Linear::set_bias(const Source& source) {
  bias_.assign(size_t(weights_.panels()) * PANEL, 0.0f);
  for (int i = 0; i < outputs_; i++) bias_[i] = source.at(0, i);
}

template <class E, class O>
void Linear::run(Engine& engine, const E* x, size_t stride, int rows, O* out, size_t out_stride) const {
  const Isa& isa = *engine.isa;
  const bool whole = weights_.multiplies_bytes<E>(isa);  // what becomes bytes is read as it lies
  Rows<E> a = weights_.operand(engine, whole ? Rows<E>{x, stride} : readable(x, stride, rows, inputs(), engine.shared[0]), rows);
  engine.reserve(ROW_BLOCK * PANEL * sizeof(float));
  int panels = weights_.panels();
  auto task = [&](int index, int worker) {
    int first = index / panels * ROW_BLOCK, panel = index % panels;
    int n = rows - first < ROW_BLOCK ? rows - first : ROW_BLOCK;
    float* sum = engine.scratch<float>(worker);
    weights_.multiply(isa, 0, panel, a.from(first), n, sum);
    int columns = outputs_ - panel * PANEL < PANEL ? outputs_ - panel * PANEL : PANEL;
    const float* bias = bias_.empty() ? nullptr : bias_.data() + panel * PANEL;
    isa.of<O>().store(sum, n, bias, out + first * out_stride + panel * PANEL, out_stride, columns);
  };
  engine.pool.run_within(ceil_div(rows, ROW_BLOCK) * panels, task);
}

template void Linear::run(Engine&, const bf16*, size_t, int, bf16*, size_t) const;
template void Linear::run(Engine&, const bf16*, size_t, int, float*, size_t) const;
template void Linear::run(Engine&, const float*, size_t, int, float*, size_t) const;

void HeadLinear::pack(int head, const Source& source) {
  weights_.pack(head, source, [this](int column) { return column < outputs_ ? column : -1; });
}

void HeadLinear::pack_int4(int head, const Int4Source& source) {
  weights_.pack_int4(head, source, [this](int column) { return column < outputs_ ? column : -1; });
}

template <class E>
void HeadLinear::run(Engine& engine, const E* x, size_t token_stride, size_t head_stride, int tokens, E* out,
                     size_t out_token, size_t out_head) const {
  const Isa& isa = *engine.isa;
  const bool whole = weights_.multiplies_bytes<E>(isa);
  int most = std::min(ROW_BLOCK, whole_groups(tokens));
  size_t wide = whole_blocks(weights_.inputs()), copied = whole ? 0 : most * wide * sizeof(E), sums = most * PANEL * sizeof(float);
  engine.reserve(copied + sums + weights_.operand_bytes(most));
  auto task = [&](int index, int worker) {
    int first = index / heads_ * ROW_BLOCK, head = index % heads_, n = std::min(ROW_BLOCK, tokens - first);
    char* memory = engine.scratch<char>(worker);
    E* rows = reinterpret_cast<E*>(memory);
    float* sum = reinterpret_cast<float*>(memory + copied);
    const E* from = x + first * token_stride + head * head_stride;
    for (int r = 0; !whole && r < n; r++) {
      memcpy(rows + r * wide, from + r * token_stride, weights_.inputs() * sizeof(E));
      memset(rows + r * wide + weights_.inputs(), 0, (wide - weights_.inputs()) * sizeof(E));
    }
    Rows<E> given = weights_.operand_at(isa, whole ? Rows<E>{from, token_stride} : Rows<E>{rows, wide}, n, memory + copied + sums);
    E* to = out + first * out_token + head * out_head;
    for (int panel = 0; panel < weights_.panels(); panel++) {
      weights_.multiply(isa, head, panel, given, n, sum);
      isa.of<E>().store(sum, n, nullptr, to + panel * PANEL, out_token, std::min(PANEL, outputs_ - panel * PANEL));
    }
  };
  engine.pool.run_within(ceil_div(tokens, ROW_BLOCK) * heads_, task);
}

template void HeadLinear::run(Engine&, const bf16*, size_t, size_t, int, bf16*, size_t, size_t) const;
template void HeadLinear::run(Engine&, const float*, size_t, size_t, int, float*, size_t, size_t) const;

template <class E>
void mlp(Engine& engine, const Linear& gate_up, const Linear& down, const E* x, size_t stride, int rows, E* out) {
  size_t inner = down.inputs(), wide = 2 * inner;
  E* both = engine.shared[4].at_least<E>(rows * (wide + inner));
  E* middle = both + rows * wide;
  gate_up.run(engine, x, stride, rows, both, wide);
  gated<E>(engine, both, rows, int(inner), middle);
  down.run(engine, middle, inner, rows, out, down.outputs());
}

template void mlp(Engine&, const Linear&, const Linear&, const bf16*, size_t, int, bf16*);
template void mlp(Engine&, const Linear&, const Linear&, const float*, size_t, int, float*);
