// Ops on single rows: norms, rotary embedding, cache writes, router scores.
#pragma once
#include "eight.h"
#include "engine.h"
#include "tiles.h"

// Calls work(row) for every row, a few rows per task.
template <class Work>
void by_rows(Engine& engine, int rows, const Work& work) {
  constexpr int together = 16;
  engine.pool.run((rows + together - 1) / together, [&](int index, int) {
    int end = (index + 1) * together < rows ? (index + 1) * together : rows;
    for (int r = index * together; r < end; r++) work(size_t(r));
  });
}

// out = weight * norm(x), rows of `size`. `x_stride` in elements; out is contiguous.
template <class E>
void rms_norm(Engine& engine, const E* x, size_t x_stride, int rows, int size, const E* weight, float eps, E* out);

// x += y, rounded once. All contiguous. Y is E or float. bad[r] becomes `layer` where it is below 0 and row r of x is not
// finite then; null for nobody who asks.
template <class E, class Y>
void add_sums(Engine& engine, E* x, const Y* y, int rows, int size, int32_t* bad, int layer);

// x += y, then out = weight * norm(x). All contiguous.
template <class E>
void add_rms_norm(Engine& engine, E* x, const E* y, int rows, int size, const E* weight, float eps, E* out);

// wide rows of gate, then up, `size` each -> out = silu(gate) * up.
template <class E>
void gated(Engine& engine, const E* wide, int rows, int size, E* out);

void check_slots(int64_t most, const int64_t* slot, int tokens);

struct Turn {
  const float *cos, *sin;  // (positions, half), contiguous
  const int64_t* position; // by token
  int positions, half;
  bool interleaved;
};

// x (tokens, heads, 2 half) with strides -> out, contiguous. Throws when a position has no row in the tables.
template <class E>
void rope(Engine& engine, const E* x, size_t token_stride, size_t head_stride, int tokens, int heads, const Turn& turn,
          E* out);

// A cache as it is written: `size` elements at each slot's place, block slot / block_size, offset slot % block_size.
template <class E>
struct Store {
  E* data;
  size_t block_stride, group_stride, token_stride;
  int groups, size, blocks, block_size;
  Layout layout = Layout::rows;
  Bits bits = Bits::whole;  // in 8 bits strides are bytes

  uint8_t* row(int64_t slot, int group) const {
    return reinterpret_cast<uint8_t*>(data) + slot / block_size * block_stride + group * group_stride +
           slot % block_size * token_stride;
  }

  void put(int64_t slot, int group, const E* row) const {
    int token = int(slot % block_size);
    E* block = data + slot / block_size * block_stride + group * group_stride;
    put_token(layout, block + token_at(layout, token_stride, size, token), size, token, row);
  }
};

// A key and its value, to caches of the same kind.
template <class E>
void put_pair(const Store<E>& keys, const Store<E>& values, int64_t slot, int group, const E* key, const E* value) {
  if (keys.bits == Bits::whole) {
    keys.put(slot, group, key);
    values.put(slot, group, value);
    return;
  }
  uint8_t* to = keys.row(slot, group);
  Scales scales;
  scales.first = to_eight(key, keys.size, keys.bits, to);
  scales.second = to_eight(value, values.size, keys.bits, values.row(slot, group));
  memcpy(to + keys.size, &scales, SCALE_BYTES);
}

// A latent of `rank` numbers with its rotary key behind it.
template <class E>
void put_latent(const Store<E>& cache, int64_t slot, const E* latent, int rank) {
  if (cache.bits == Bits::whole) return cache.put(slot, 0, latent);
  uint8_t* to = cache.row(slot, 0);
  Scales scales;
  scales.first = to_eight(latent, rank, cache.bits, to);
  scales.second = to_eight(latent + rank, cache.size - rank, cache.bits, to + rank);
  memcpy(to + cache.size, &scales, SCALE_BYTES);
}

// Throw std::out_of_range, naming the argument, for a position without a row in the tables or a slot outside the cache.
void check_positions(const Turn& turn, int tokens);

template <class E>
void check_slots(const Store<E>& cache, const int64_t* slot, int tokens) {
  check_slots(int64_t(cache.blocks) * cache.block_size, slot, tokens);
}

// x (tokens, groups, size) with strides. Throws when a slot is outside the cache.
template <class E>
void write_cache(const E* x, size_t token_stride, size_t group_stride, int tokens, const int64_t* slot,
                 const Store<E>& cache);

// The same of keys (tokens, groups, size) and values beside them, and of latents (tokens, size).
template <class E>
void write_pairs(const E* k, const E* v, int tokens, const int64_t* slot, const Store<E>& keys, const Store<E>& values);
template <class E>
void write_latents(const E* x, int tokens, const int64_t* slot, const Store<E>& cache, int rank);
