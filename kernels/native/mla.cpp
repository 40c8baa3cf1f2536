#include "mla.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "carver.h"
#include "pointwise.h"

namespace {

constexpr int MOST_LATENT = 4096;  // elements of a row of the cache

void expect(const char* name, int found, int wanted) {
  if (found != wanted)
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(found) + ", expected " + std::to_string(wanted));
}

}  // namespace

MlaLayer::MlaLayer(const MlaShape& s, const MlaWeights& w) : shape_(s), weights_(w) {
  int query = w.q_up ? w.q_up->inputs() : s.heads * (s.nope + s.rope);
  if (s.rank + s.rope > MOST_LATENT)
    throw std::invalid_argument("rank: rows of " + std::to_string(s.rank + s.rope) + " elements, at most " +
                                std::to_string(MOST_LATENT));
  expect("down: inputs", w.down->inputs(), s.hidden);
  expect("down: outputs", w.down->outputs(), query + s.rank + s.rope);
  if (w.q_up) expect("q_up: outputs", w.q_up->outputs(), s.heads * (s.nope + s.rope));
  expect("up_k: heads", w.up_k->heads(), s.heads);
  expect("up_k: inputs", w.up_k->inputs(), s.nope);
  expect("up_k: outputs", w.up_k->outputs(), s.rank);
  expect("up_v: heads", w.up_v->heads(), s.heads);
  expect("up_v: inputs", w.up_v->inputs(), s.rank);
  expect("up_v: outputs", w.up_v->outputs(), s.value);
  expect("out: inputs", w.out->inputs(), s.heads * s.value);
  expect("out: outputs", w.out->outputs(), s.hidden);
  if (w.gate) expect("gate: inputs", w.gate->inputs(), s.hidden);
}

template <class E>
void MlaLayer::place(Engine& engine, const MlaCall<E>& call, const E* down, const E* query, size_t query_stride,
                     E* q) const {
  const Loops<E>& loops = engine.isa->of<E>();
  const MlaShape& s = shape_;
  size_t all = weights_.down->outputs(), row = s.rank + s.rope, head = s.nope + s.rope;
  by_rows(engine, call.tokens, [&](size_t t) {
    const E* latent = down + t * all + (all - row);
    size_t at = size_t(call.turn.position[t]) * call.turn.half;
    auto turn = [&](const E* from, E* to) {
      loops.rope(from, call.turn.cos + at, call.turn.sin + at, call.turn.half, call.turn.interleaved, to);
    };
    E kept[MOST_LATENT];
    loops.rms_norm(latent, static_cast<const E*>(weights_.latent_norm), s.latent_eps, s.rank, kept);
    turn(latent + s.rank, kept + s.rank);
    put_latent(call.latents, call.kv_slot[t], kept, s.rank);
    for (int h = 0; h < s.heads; h++)
      turn(query + t * query_stride + h * head + s.nope, q + (t * s.heads + h) * row + s.rank);
  });
}

template <class E>
void MlaLayer::look(Engine& engine, const MlaCall<E>& call, const Batch& batch, const E* q, E* seen) const {
  const MlaShape& s = shape_;
  const Store<E>& c = call.latents;
  size_t row = s.rank + s.rope, heads = s.heads;
  Cache<E> keys{c.data, c.block_stride, c.group_stride, c.token_stride, int(row), c.layout, c.bits}, values = keys;
  values.size = s.rank;
  Attention<E> attention{q, heads * row, row, s.heads, 1, keys, values, c.blocks, c.block_size, s.scale, 0, seen};
  attention.alone = weights_.index.queries || s.reuses;
  if (!call.slot || !attention.alone) return attend(engine, attention, batch);
  // Each token is a sequence of its own, over the cache as blocks of one row: a slot is a block.
  attention.keys.block_stride = attention.values.block_stride = c.token_stride;
  attention.blocks = c.blocks * c.block_size, attention.block_size = 1;
  std::vector<int32_t> start(call.tokens + 1), count(call.tokens);
  for (int t = 0; t < call.tokens; t++) {
    start[t + 1] = t + 1;
    count[t] = int32_t(std::min<int64_t>(call.turn.position[t] + 1, call.most));
  }
  auto alone = [&](const int32_t* table, int first, int tokens) {
    attention.q = q + first * heads * row, attention.out = seen + first * heads * s.rank;
    attend(engine, attention, Batch{start.data(), count.data() + first, table, size_t(call.most), tokens,
                                    batch.position + first, batch.slot + first, tokens});
  };
  if (!call.near) return alone(call.slot, 0, call.tokens);
  attention.keys.data = attention.values.data = reinterpret_cast<E*>(call.near->rows);
  attention.keys.block_stride = attention.values.block_stride = row;
  attention.blocks = call.near->capacity;
  int together = std::max(1, std::min(call.tokens, call.near->capacity / call.most));
  std::vector<int32_t> place(size_t(together) * call.most);
  for (int first = 0; first < call.tokens; first += together) {
    int tokens = std::min(together, call.tokens - first);
    call.near->fetch(engine, call.slot + size_t(first) * call.most, count.data() + first, call.most, tokens, place.data());
    alone(place.data(), first, tokens);
  }
}

template <class E>
void MlaLayer::run(Engine& engine, const MlaCall<E>& call, const Batch& batch) const {
  const MlaShape& s = shape_;
  size_t tokens = call.tokens, hidden = s.hidden, heads = s.heads, all = weights_.down->outputs();
  size_t head = s.nope + s.rope, row = s.rank + s.rope, wide = heads * head, first = all - row;
  check_positions(call.turn, call.tokens);
  check_slots(call.latents, call.kv_slot, call.tokens);

  size_t each = 2 * hidden + all + first + wide + heads * (row + s.rank + s.value);
  Carver carver(engine.shared[4].at_least<char>(tokens * each * sizeof(E) + 8 * 64));
  E *h = carver.take<E>(tokens * hidden), *down = carver.take<E>(tokens * all), *ranked = carver.take<E>(tokens * first);
  E *query = carver.take<E>(tokens * wide), *q = carver.take<E>(tokens * heads * row);
  E *seen = carver.take<E>(tokens * heads * s.rank), *o = carver.take<E>(tokens * heads * s.value);
  E* y = carver.take<E>(tokens * hidden);

  rms_norm<E>(engine, call.x, hidden, call.tokens, s.hidden, static_cast<const E*>(weights_.input_norm), s.eps, h);
  weights_.down->run(engine, h, hidden, call.tokens, down, all);
  E* queries = down;
  size_t stride = all;
  if (weights_.q_up) {
    rms_norm<E>(engine, down, all, call.tokens, int(first), static_cast<const E*>(weights_.q_norm), s.latent_eps, ranked);
    weights_.q_up->run(engine, ranked, first, call.tokens, query, wide);
    queries = query, stride = wide;
  }
  if (weights_.steps.query_scale)
    by_rows(engine, call.tokens, [&](size_t t) {
      scale_row(queries + t * stride, int(wide), weights_.steps.query_scale[call.turn.position[t]]);
    });
  place(engine, call, down, queries, stride, q);
  if (call.near) call.near->forget(call.kv_slot, call.tokens);
  weights_.up_k->run(engine, queries, stride, head, call.tokens, q, heads * row, row);
  if (weights_.index.queries) {
    const IndexerWeights& i = weights_.index;
    size_t size = i.keys->outputs(), queries_size = i.queries->outputs(), index_heads = i.weights->outputs();
    Carver beside(engine.shared[3].at_least<char>(tokens * ((size + queries_size) * sizeof(E) + index_heads * sizeof(float)) + 3 * 64));
    E *index_query = beside.take<E>(tokens * queries_size), *index_key = beside.take<E>(tokens * size);
    index_rows(engine, s.index, i, IndexCall<E>{h, ranked, hidden, first, call.tokens, call.turn, call.kv_slot, call.index,
                                               call.slot, call.most, index_query, index_key, beside.take<float>(tokens * index_heads)},
               batch);
  }
  look(engine, call, batch, q, seen);
  weights_.up_v->run(engine, seen, heads * s.rank, s.rank, call.tokens, o, heads * s.value, s.value);
  open_heads(engine, weights_.steps, h, call.tokens, s.heads, s.value, o);
  weights_.out->run(engine, o, heads * s.value, call.tokens, y, hidden);
  end_half(engine, weights_.steps,
           HalfEnd<E>{call.x, y, call.normed, call.tokens, s.hidden, static_cast<const E*>(weights_.post_norm), s.eps, h,
                      weights_.gate.get(), weights_.bias, &weights_.rule, call.expert, call.weight});
}

template void MlaLayer::run(Engine&, const MlaCall<bf16>&, const Batch&) const;
template void MlaLayer::run(Engine&, const MlaCall<float>&, const Batch&) const;
