#include "rows.h"

#include <stdexcept>

void check_positions(const Turn& turn, int tokens) {
  for (int t = 0; t < tokens; t++)
    if (turn.position[t] < 0 || turn.position[t] >= turn.positions)
      throw std::out_of_range("position_T: " + std::to_string(turn.position[t]) + ", the tables have " +
                              std::to_string(turn.positions) + " positions");
}

void check_slots(int64_t most, const int64_t* slot, int tokens) {
  for (int t = 0; t < tokens; t++)
    if (slot[t] < 0 || slot[t] >= most)
      throw std::out_of_range("kv_slot_T: " + std::to_string(slot[t]) + ", the cache has " + std::to_string(most) +
                              " slots");
}

template <class E>
void rms_norm(Engine& engine, const E* x, size_t x_stride, int rows, int size, const E* weight, float eps, E* out) {
  auto norm = engine.isa->of<E>().rms_norm;
  by_rows(engine, rows, [&](size_t r) { norm(x + r * x_stride, weight, eps, size, out + r * size); });
}

template <class E, class Y>
void add_sums(Engine& engine, E* x, const Y* y, int rows, int size, int32_t* bad, int layer) {
  const Loops<E>& loops = engine.isa->of<E>();
  bool (*add)(E*, const Y*, int);
  if constexpr (sizeof(E) == sizeof(Y))
    add = loops.add;
  else
    add = loops.add_sums;
  by_rows(engine, rows, [&](size_t r) {
    if (!add(x + r * size, y + r * size, size) && bad && bad[r] < 0) bad[r] = layer;
  });
}

template <class E>
void add_rms_norm(Engine& engine, E* x, const E* y, int rows, int size, const E* weight, float eps, E* out) {
  const Loops<E>& loops = engine.isa->of<E>();
  by_rows(engine, rows, [&](size_t r) {
    loops.add(x + r * size, y + r * size, size);
    loops.rms_norm(x + r * size, weight, eps, size, out + r * size);
  });
}

template <class E>
void gated(Engine& engine, const E* wide, int rows, int size, E* out) {
  auto loop = engine.isa->of<E>().gated;
  by_rows(engine, rows, [&](size_t r) { loop(wide + 2 * r * size, wide + (2 * r + 1) * size, size, out + r * size); });
}

template <class E>
void rope(Engine& engine, const E* x, size_t token_stride, size_t head_stride, int tokens, int heads, const Turn& turn,
          E* out) {
  auto loop = engine.isa->of<E>().rope;
  check_positions(turn, tokens);
  by_rows(engine, tokens, [&](size_t t) {
    size_t at = size_t(turn.position[t]) * turn.half;
    for (size_t h = 0; h < size_t(heads); h++)
      loop(x + t * token_stride + h * head_stride, turn.cos + at, turn.sin + at, turn.half, turn.interleaved,
           out + (t * heads + h) * 2 * turn.half);
  });
}

template <class E>
void write_cache(const E* x, size_t token_stride, size_t group_stride, int tokens, const int64_t* slot,
                 const Store<E>& cache) {
  check_slots(cache, slot, tokens);
  for (int t = 0; t < tokens; t++)
    for (int g = 0; g < cache.groups; g++)
      cache.put(slot[t], g, x + t * token_stride + g * group_stride);
}

template <class E>
void write_pairs(const E* k, const E* v, int tokens, const int64_t* slot, const Store<E>& keys, const Store<E>& values) {
  check_slots(keys, slot, tokens);
  for (int t = 0; t < tokens; t++)
    for (int g = 0; g < keys.groups; g++, k += keys.size, v += values.size) put_pair(keys, values, slot[t], g, k, v);
}

template <class E>
void write_latents(const E* x, int tokens, const int64_t* slot, const Store<E>& cache, int rank) {
  check_slots(cache, slot, tokens);
  for (int t = 0; t < tokens; t++, x += cache.size) put_latent(cache, slot[t], x, rank);
}

#define FOR(E)                                                                                                    \
  template void rms_norm(Engine&, const E*, size_t, int, int, const E*, float, E*);                               \
  template void add_sums(Engine&, E*, const E*, int, int, int32_t*, int);                                         \
  template void add_rms_norm(Engine&, E*, const E*, int, int, const E*, float, E*);                               \
  template void gated(Engine&, const E*, int, int, E*);                                                           \
  template void rope(Engine&, const E*, size_t, size_t, int, int, const Turn&, E*);                               \
  template void write_cache(const E*, size_t, size_t, int, const int64_t*, const Store<E>&);                      \
  template void write_pairs(const E*, const E*, int, const int64_t*, const Store<E>&, const Store<E>&);           \
  template void write_latents(const E*, int, const int64_t*, const Store<E>&, int);
FOR(bf16)
FOR(float)
template void add_sums(Engine&, bf16*, const float*, int, int, int32_t*, int);
