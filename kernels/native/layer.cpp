#include "layer.h"

#include <algorithm>

#include "carver.h"
#include "pointwise.h"

namespace {

constexpr int MOST_HEAD = 1024;  // elements of one head; checked at the door

template <class E>
Cache<E> cache_of(const Store<E>& s) {
  return {s.data, s.block_stride, s.group_stride, s.token_stride, s.size, s.layout, s.bits};
}

}  // namespace

template <class E>
void GqaLayer::place_heads(Engine& engine, const LayerCall<E>& call, E* qkv, E* q) const {
  const Loops<E>& loops = engine.isa->of<E>();
  int size = shape_.size, heads = shape_.heads, groups = shape_.groups, wide = heads + 2 * groups;
  auto rope = [&](const E* head, size_t t, E* out) {
    size_t at = size_t(call.turn.position[t]) * call.turn.half;
    loops.rope(head, call.turn.cos + at, call.turn.sin + at, call.turn.half, false, out);
  };
  auto normalise = [&](const E* x, const void* norm, int count, E* out) {
    loops.rms_norm(x, static_cast<const E*>(norm), shape_.eps, count * size, out);
  };
  auto turn = [&](const E* head, const void* norm, size_t t, E* out) {
    if (!norm || shape_.wide) return rope(head, t, out);
    E other[MOST_HEAD];
    if (shape_.late) {
      rope(head, t, other);
      normalise(other, norm, 1, out);
    } else {
      normalise(head, norm, 1, other);
      rope(other, t, out);
    }
  };
  const HalfSteps& steps = weights_.steps;
  by_rows(engine, call.tokens, [&](size_t t) {
    E* row = qkv + t * wide * size;
    if (shape_.wide) {
      normalise(row, weights_.q_norm, heads, row);
      normalise(row + heads * size, weights_.k_norm, groups, row + heads * size);
    }
    if (steps.clip > 0) clip_row(row, wide * size, steps.clip);
    for (int h = 0; h < heads; h++) turn(row + h * size, weights_.q_norm, t, q + (t * heads + h) * size);
    if (steps.query_scale) scale_row(q + t * heads * size, heads * size, steps.query_scale[call.turn.position[t]]);
    for (int g = 0; g < groups; g++) {
      E key[MOST_HEAD], *value = row + (heads + groups + g) * size;
      turn(row + (heads + g) * size, weights_.k_norm, t, key);
      if (steps.value_norm) normalise(value, steps.value_norm, 1, value);
      put_pair(call.keys, call.values, call.slot[t], g, key, value);
    }
  });
}

template <class E>
void GqaLayer::run(Engine& engine, const LayerCall<E>& call, const Batch& batch) const {
  size_t tokens = call.tokens, hidden = shape_.hidden, wide = size_t(shape_.heads) * shape_.size;
  size_t all = wide + size_t(2 * shape_.groups) * shape_.size;
  check_positions(call.turn, call.tokens);
  check_slots(call.keys, call.slot, call.tokens);

  size_t bytes = tokens * (2 * hidden + all + 2 * wide) * sizeof(E) + 5 * 64;
  Carver carver(engine.shared[4].at_least<char>(bytes));
  E *h = carver.take<E>(tokens * hidden), *qkv = carver.take<E>(tokens * all), *q = carver.take<E>(tokens * wide);
  E *o = carver.take<E>(tokens * wide), *y = carver.take<E>(tokens * hidden);

  norm_before(engine, weights_.steps, call.x, call.tokens, shape_.hidden, weights_.input_norm, shape_.eps, h);
  weights_.qkv->run(engine, h, hidden, call.tokens, qkv, all);
  place_heads(engine, call, qkv, q);
  Attention<E> attention{q, wide, size_t(shape_.size), shape_.heads, shape_.groups, cache_of(call.keys),
                         cache_of(call.values), call.keys.blocks, call.keys.block_size, shape_.scale,
                         shape_.window, o, weights_.sinks};
  attend(engine, attention, batch);
  open_heads(engine, weights_.steps, h, call.tokens, shape_.heads, shape_.size, o);
  weights_.out->run(engine, o, wide, call.tokens, y, hidden);
  end_half(engine, weights_.steps,
           HalfEnd<E>{call.x, y, call.normed, call.tokens, shape_.hidden, static_cast<const E*>(weights_.post_norm), shape_.eps, h,
                      weights_.gate.get(), weights_.bias, &weights_.rule, call.expert, call.weight});
}

template void GqaLayer::run(Engine&, const LayerCall<bf16>&, const Batch&) const;
template void GqaLayer::run(Engine&, const LayerCall<float>&, const Batch&) const;
