// Ops on single rows: norms, rotary embedding, cache writes, router scores.
#pragma once
#include "engine.h"

// out = weight * norm(x), rows of `size`. `x_stride` in elements; out is contiguous.
template <class E>
void rms_norm(Engine& engine, const E* x, size_t x_stride, int rows, int size, const E* weight, float eps, E* out);

// x += y, then out = weight * norm(x). All contiguous.
template <class E>
void add_rms_norm(Engine& engine, E* x, const E* y, int rows, int size, const E* weight, float eps, E* out);

// wide rows of gate, then up, `size` each -> out = silu(gate) * up.
template <class E>
void gated(Engine& engine, const E* wide, int rows, int size, E* out);

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

// Rows of `size` elements at each slot's place: block slot / block_size, offset slot % block_size.
template <class E>
struct Store {
  E* data;
  size_t block_stride, group_stride, token_stride;
  int groups, size, blocks, block_size;
};

// x (tokens, groups, size) with strides. Throws when a slot is outside the cache.
template <class E>
void write_cache(const E* x, size_t token_stride, size_t group_stride, int tokens, const int64_t* slot,
                 const Store<E>& cache);
