#include "stack.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "carver.h"
#include "pointwise.h"
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
    if (layer.gate_up) {
      expect_same(at, "inputs of gate and up", layer.gate_up->inputs(), hidden_);
      int wide = layer.steps.joined && layer.steps.gating.squared ? 1 : 2;
      expect_same(at, "outputs of gate and up", layer.gate_up->outputs(), wide * layer.down->inputs());
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
void Stack::run_local(Engine& engine, const StackLayer& layer, const E* x, const E* normed, int rows, E* out) const {
  const FfnSteps& steps = layer.steps;
  size_t inner = layer.down->inputs(), wide = layer.gate_up->outputs();
  if (steps.before) {
    E* read = engine.shared[3].at_least<E>(size_t(rows) * hidden_);
    rms_norm<E>(engine, x, hidden_, rows, hidden_, static_cast<const E*>(steps.before), steps.eps, read);
    normed = read;
  }
  if (steps.joined) {
    E *both = engine.shared[4].at_least<E>(rows * (wide + inner)), *middle = both + rows * wide;
    layer.gate_up->run(engine, normed, hidden_, rows, both, wide);
    join_rows(engine, steps.gating, both, rows, int(inner), middle);
    layer.down->run(engine, middle, inner, rows, out, hidden_);
  } else {
    mlp(engine, *layer.gate_up, *layer.down, normed, hidden_, rows, out);
  }
  if (steps.scale != 1.0f) scale_rows(engine, out, rows, hidden_, steps.scale);
  if (!steps.opening) return;
  E* gate = engine.shared[4].at_least<E>(rows);
  steps.opening->run(engine, normed, hidden_, rows, gate, 1);
  open_rows(engine, out, rows, 1, hidden_, gate, 1, false, Opening::sigmoid);
}

template <class E>
void Stack::add_together(Engine& engine, const StackLayer& layer, const float* routed, E* beside, const StackRows<E>& rows,
                         int tokens, int at) const {
  const FfnSteps& steps = layer.steps;
  auto normalise = [&](E* y, const void* weight) {
    if (weight) rms_norm<E>(engine, y, hidden_, tokens, hidden_, static_cast<const E*>(weight), steps.eps, y);
  };
  bool apart = steps.after_routed;
  E* sum = engine.shared[4].at_least<E>(size_t(tokens) * hidden_);
  round_rows<E>(engine, routed, layer.gate_up && !apart ? beside : nullptr, tokens, hidden_, sum);
  normalise(sum, steps.after_routed);
  if (apart && layer.gate_up) {
    normalise(beside, steps.after_shared);
    add_rows(engine, sum, beside, tokens, hidden_);
  }
  normalise(sum, steps.after);
  add_sums<E, E>(engine, rows.x, sum, tokens, hidden_, rows.bad, at);
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
    const FfnSteps& steps = layer.steps;
    if (layer.gate_up)
      run_local<E>(engine, layer, x, normed, batch.tokens, beside);
    else if (!layer.routes())
      memset(static_cast<void*>(beside), 0, all * sizeof(E));  // so that rows are looked at
    bool added = layer.routes() && layer.gate_up && !steps.at_once();
    if (added) add_rows(engine, x, beside, batch.tokens, hidden_);
    if (layer.routes()) expert += chosen;
    if (!layer.routes()) {
      if (steps.after)
        rms_norm<E>(engine, beside, hidden_, batch.tokens, hidden_, static_cast<const E*>(steps.after), steps.eps, beside);
      add_sums<E, E>(engine, x, beside, batch.tokens, hidden_, rows.bad, int(at));
    } else if (layer.away) {  // its own part was made, and added where it can be, while rows were under way
      const float* sums = exchange->sums(routed, hidden_);
      if (!sums) {
        done.layers = int(at);
        break;
      }
      if (steps.at_once())
        add_together<E>(engine, layer, sums, beside, rows, batch.tokens, int(at));
      else
        add_sums<E, float>(engine, x, sums, batch.tokens, hidden_, rows.bad, int(at));
    } else if (steps.at_once()) {
      layer.experts->run(engine, normed, hidden_, expert - chosen, weight, batch.tokens, top_k_, routed, hidden_, false);
      add_together<E>(engine, layer, routed, beside, rows, batch.tokens, int(at));
    } else {
      layer.experts->add_to(engine, normed, expert - chosen, weight, batch.tokens, top_k_, x, rows.bad, int(at));
    }
    if (steps.row_scale != 1.0f) scale_rows(engine, x, batch.tokens, hidden_, steps.row_scale);
    if (layer.experts) here += Clock::now() - since;
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
