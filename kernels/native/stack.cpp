#include "stack.h"

#include <chrono>
#include <stdexcept>

#include "carver.h"
#include "rows.h"

namespace {

using Clock = std::chrono::steady_clock;

// x += local, then x += routed, each rounded once. `local` is null where there is none.
template <class E>
void add_both(Engine& engine, E* x, const E* local, const float* routed, int rows, int size, int32_t* bad, int layer) {
  const Loops<E>& loops = engine.isa->of<E>();
  by_rows(engine, rows, [&](size_t r) {
    if (local) loops.add(x + r * size, local + r * size, size);
    if (!loops.add_sums(x + r * size, routed + r * size, size) && bad && bad[r] < 0) bad[r] = layer;
  });
}

void expect(size_t layer, const char* what, int found, int wanted) {
  if (found != wanted)
    throw std::invalid_argument("layer " + std::to_string(layer) + ": " + what + " " + std::to_string(found) +
                                ", expected " + std::to_string(wanted));
}

}  // namespace

Stack::Stack(std::vector<StackLayer> layers) : layers_(std::move(layers)) {
  if (layers_.empty()) throw std::invalid_argument("a stack has at least one layer");
  hidden_ = layers_[0].attention.hidden;
  for (size_t at = 0; at < layers_.size(); at++) {
    const StackLayer& layer = layers_[at];
    expect(at, "dtype", int(layer.attention.dtype), int(dtype()));
    expect(at, "hidden size", layer.attention.hidden, hidden_);
    if (!layer.experts && !layer.gate_up) throw std::invalid_argument("layer " + std::to_string(at) + ": no FFN");
    if (layer.gate_up) {
      expect(at, "inputs of gate and up", layer.gate_up->inputs(), hidden_);
      expect(at, "outputs of gate and up", layer.gate_up->outputs(), 2 * layer.down->inputs());
      expect(at, "outputs of down", layer.down->outputs(), hidden_);
    }
    if (!layer.experts) continue;
    if (!top_k_) top_k_ = layer.attention.top_k;
    expect(at, "hidden size of experts", layer.experts->hidden(), hidden_);
    expect(at, "top_k", layer.attention.top_k, top_k_);
    if (!top_k_) throw std::invalid_argument("layer " + std::to_string(at) + ": experts without a router");
  }
}

template <class E>
double Stack::run(Engine& engine, const Batch& batch, E* x, int32_t* expert, int32_t* bad) const {
  size_t tokens = batch.tokens, all = tokens * hidden_, chosen = tokens * top_k_;
  size_t bytes = all * (2 * sizeof(E) + sizeof(float)) + chosen * sizeof(float) + 4 * 64;
  Carver carver(engine.shared[5].at_least<char>(bytes));
  E *normed = carver.take<E>(all), *beside = carver.take<E>(all);
  float *routed = carver.take<float>(all), *weight = carver.take<float>(chosen);

  Clock::duration away{};
  for (size_t at = 0; at < layers_.size(); at++) {
    const StackLayer& layer = layers_[at];
    layer.attention.run(engine, batch, {x, normed, layer.experts ? expert : nullptr, weight});
    auto since = Clock::now();
    if (layer.gate_up) mlp(engine, *layer.gate_up, *layer.down, normed, hidden_, batch.tokens, beside);
    if (!layer.experts) {
      add_sums<E, E>(engine, x, beside, batch.tokens, hidden_, bad, int(at));
      continue;
    }
    layer.experts->run(engine, normed, hidden_, expert, weight, batch.tokens, top_k_, routed, hidden_, false);
    away += Clock::now() - since;
    add_both(engine, x, layer.gate_up ? beside : nullptr, routed, batch.tokens, hidden_, bad, int(at));
    expert += chosen;
  }
  return std::chrono::duration<double>(away).count();
}

template double Stack::run(Engine&, const Batch&, bf16*, int32_t*, int32_t*) const;
template double Stack::run(Engine&, const Batch&, float*, int32_t*, int32_t*) const;
