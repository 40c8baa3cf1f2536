// Which cached rows a token attends (kernels/indexer.py): index keys are scored by each of a token's index heads, and the
// `top` best are chosen, the earlier one of equals.
#pragma once
#include "attention.h"

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
