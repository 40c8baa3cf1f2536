// Paged attention: every sequence's new tokens over its whole cached context. GQA and absorbed MLA are the same
// loop: MLA has one key/value head, and its values are the first columns of its keys.
#pragma once
#include <cmath>

#include "eight.h"
#include "engine.h"
#include "tiles.h"

// One of the two caches, block by block. Strides in elements; within tiles token_stride means nothing. Tiles need
// block and head sizes that are multiples of 16. In 8 bits (eight.h) there are rows alone, and strides are bytes.
template <class E>
struct Cache {
  const E* data;
  size_t block_stride, group_stride, token_stride;
  int size;  // elements of one key or value
  Layout layout = Layout::rows;
  Bits bits = Bits::whole;

  const E* at(int block, int group, int token) const {
    return past(data, block * block_stride + group * group_stride + token_at(layout, token_stride, size, token));
  }

  // So many of what strides count behind a place.
  const E* past(const E* place, size_t strides) const {
    size_t bytes = bits == Bits::whole ? strides * sizeof(E) : strides;
    return reinterpret_cast<const E*>(reinterpret_cast<const char*>(place) + bytes);
  }
};

// The integers of afserve.kernels.paged.PagedBatch, for S sequences.
struct Batch {
  const int32_t* query_start;
  const int32_t* context;
  const int32_t* table;
  size_t table_stride;
  int sequences;
  const int64_t* position;  // by token
  const int64_t* slot;      // by token
  int tokens;
};

template <class E>
struct Attention {
  const E* q;
  size_t q_token, q_head;  // strides in elements
  int heads, groups;
  Cache<E> keys, values;
  int blocks, block_size;  // of both caches
  float scale;
  int window;  // 0: all of the context
  E* out;      // (tokens, heads, values.size)
  const float* sinks = nullptr;  // by head: a logit that takes weight and gives no value; null without
  bool alone = false;  // rows have the bits that they have as blocks of one

  bool latent() const { return keys.data == values.data; }  // whose first numbers are the values

  // What a row's weights add up to, relative to e^top, where those of keys are `total`.
  float with_sink(float total, int head, float top) const { return sinks ? total + std::exp(sinks[head] - top) : total; }
};

// Throws when a block id is not below a.blocks, or the scale not above 0.
template <class E>
void attend(Engine& engine, const Attention<E>& a, const Batch& batch);
