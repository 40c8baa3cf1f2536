#include "stack.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "carver.h"
#include "rows.h"

namespace {

using Clock = std::chrono::steady_clock;

// x += y, rounded once.
template <class E>
void add_rows(Engine& engine, E* x, const E* y, int rows, int size) {
  const Loops<E>& loops = engine.isa->of<E>();
  by_rows(engine, rows, [&](size_t r) { loops.add(x + r * size, y + r * size, size); });
}

void expect_same(size_t layer, const char* what, int found, int wanted) {
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
    expect_same(at, "dtype", int(layer.attention.dtype), int(dtype()));
    expect_same(at, "hidden size", layer.attention.hidden, hidden_);
    away_ += layer.away;
    groups_ = std::max(groups_, size_t(layer.group) + 1);
    if (!layer.routes() && !layer.gate_up) throw std::invalid_argument("layer " + std::to_string(at) + ": no FFN");
    if (layer.gate_up) {
      expect_same(at, "inputs of gate and up", layer.gate_up->inputs(), hidden_);
      expect_same(at, "outputs of gate and up", layer.gate_up->outputs(), 2 * layer.down->inputs());
      expect_same(at, "outputs of down", layer.down->outputs(), hidden_);
    }
    if (!layer.routes()) continue;
    moe_layers_++;
    if (!top_k_) top_k_ = layer.attention.top_k;
    if (layer.experts) expect_same(at, "hidden size of experts", layer.experts->hidden(), hidden_);
    expect_same(at, "top_k", layer.attention.top_k, top_k_);
    if (!top_k_) throw std::invalid_argument("layer " + std::to_string(at) + ": experts without a router");
  }
}

void Stack::expect(const Exchange* exchange) const {
  size_t there = exchange ? exchange->layers() : 0;
  if (there != away_)
    throw std::invalid_argument("an exchange of " + std::to_string(there) + " layers, expected " + std::to_string(away_));
}

template <class E>
Stacked Stack::run(Engine& engine, const std::vector<const Batch*>& groups, StackRows<E> rows, Exchange* exchange) const {
  expect(exchange);
  if (groups.size() != groups_)
    throw std::invalid_argument("block tables of " + std::to_string(groups.size()) + " groups, expected " +
                                std::to_string(groups_));
  const Batch& batch = *groups[0];
  size_t tokens = batch.tokens, all = tokens * hidden_, chosen = tokens * top_k_;
  size_t bytes = all * (2 * sizeof(E) + sizeof(float)) + chosen * sizeof(float) + 4 * 64;
  Carver carver(engine.shared[5].at_least<char>(bytes));
  E *x = rows.x, *beside = carver.take<E>(all), *normed = rows.normed ? rows.normed : carver.take<E>(all);
  float *routed = carver.take<float>(all), *weight = rows.weight ? rows.weight : carver.take<float>(chosen);
  int32_t* expert = rows.expert;

  Clock::duration here{};
  Stacked done{int(layers_.size()), 0};
  for (size_t at = 0, moe = 0; at < layers_.size(); at++) {
    const StackLayer& layer = layers_[at];
    layer.attention.run(engine, *groups[layer.group], {x, normed, layer.routes() ? expert : nullptr, weight, rows.slot, rows.most});
    auto since = Clock::now();
    if (layer.away)
      exchange->send(moe++, normed, hidden_ * int64_t(sizeof(E)), expert, weight, batch.tokens, top_k_);
    if (layer.gate_up) mlp(engine, *layer.gate_up, *layer.down, normed, hidden_, batch.tokens, beside);
    if (!layer.routes()) {
      add_sums<E, E>(engine, x, beside, batch.tokens, hidden_, rows.bad, int(at));
      continue;
    }
    expert += chosen;
    if (layer.away) {  // its own part is added while rows are under way
      if (layer.gate_up) add_rows(engine, x, beside, batch.tokens, hidden_);
      const float* sums = exchange->sums(routed, hidden_);
      if (!sums) {
        done.layers = int(at);
        break;
      }
      add_sums<E, float>(engine, x, sums, batch.tokens, hidden_, rows.bad, int(at));
      continue;
    }
    if (layer.gate_up) add_rows(engine, x, beside, batch.tokens, hidden_);
    layer.experts->add_to(engine, normed, expert - chosen, weight, batch.tokens, top_k_, x, rows.bad, int(at));
    here += Clock::now() - since;
  }
  done.ffn_seconds = std::chrono::duration<double>(here).count();
  if (exchange) {
    Exchange::Spans spans = exchange->take_spans();
    done.ffn_seconds += spans.under_way;
    done.waited = spans.waited;
  }
  return done;
}

template Stacked Stack::run(Engine&, const std::vector<const Batch*>&, StackRows<bf16>, Exchange*) const;
template Stacked Stack::run(Engine&, const std::vector<const Batch*>&, StackRows<float>, Exchange*) const;
