// Which cached rows a token attends (kernels/indexer.py): index keys are scored by each of a token's index heads, and the
// `top` best are chosen, the earlier one of equals.
#pragma once
#include <memory>

#include "attention.h"
#include "linear.h"
#include "rows.h"

template <class E>
struct IndexQueries {
  const E* q;              // (tokens, heads, keys.size)
  size_t q_token, q_head;  // strides in elements
  const float* weight;     // (tokens, heads), contiguous
  int heads, top;
  Cache<E> keys;  // rows of one group
  int blocks, block_size;
  int32_t* slot;  // (tokens, most): block * block_size + offset, in the order of positions
  int most;       // the least of `top` and the longest context, or more
};

// What is behind a token's last row stays as it is. Throws when a block id is not below `blocks`, or sizes do not fit.
template <class E>
void choose_rows(Engine& engine, const IndexQueries<E>& queries, const Batch& batch);

// An indexer of a layer. `queries` are null where there is none. Norms are the caller's to keep alive.
struct IndexerWeights {
  std::shared_ptr<Linear> queries, keys, weights;
  const void *norm, *bias;
};

struct IndexerShape {
  int top = 0;
  bool interleaved = false;
};

// Of a step's tokens: the row behind the layer's first norm, and what attention's own queries are made of. The last three
// are memory: (tokens, heads * size), (tokens, size) and (tokens, heads).
template <class E>
struct IndexCall {
  const E *normed, *ranked;
  size_t hidden, rank;
  int tokens;
  Turn turn;
  const int64_t* kv_slot;
  Store<E> keys;
  int32_t* slot;  // as of HalfRows
  int most;
  E *query, *key;
  float* weight;
};

// The tokens' keys to their places, and then what each token attends, unless that is all.
template <class E>
void index_rows(Engine& engine, const IndexerShape& shape, const IndexerWeights& weights, const IndexCall<E>& call,
                const Batch& batch);
