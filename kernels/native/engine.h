// What every op of one backend shares: the inner loops of the chosen instruction set, the threads, and scratch
// memory that is kept between calls. One op at a time: the caller is one thread of Python.
#pragma once
#include <memory>
#include <string>

#include "isa.h"
#include "memory.h"
#include "pool.h"

struct Engine {
  Engine(int threads, const std::string& isa_name);

  // Called before the tasks start, so that no thread of the pool ever allocates.
  void reserve(size_t bytes);

  // One more thread computes while another node lends it this core, in `memory` that stays as long; without a core there
  // is no such thread. Between two ops.
  void borrow(const LentCore& core, std::shared_ptr<void> memory);

  template <class T>
  T* scratch(int thread) const {
    return reinterpret_cast<T*>(worker[thread].data());
  }

  const Isa* isa;
  std::shared_ptr<void> lent_memory;  // before the pool, whose guest reads it
  Pool pool;
  std::vector<Memory> worker;  // one per thread
  Memory shared[6];            // one op's, written by disjoint tasks; [4] is that of ops made of other ops, [5] of all layers
};

// Rows as a product may read them: whole blocks of inputs, zero past the last input, and whole groups of rows. `bytes`:
// the same rows where weights of 8 bits are multiplied so.
template <class E>
struct Rows {
  const E* data;
  size_t stride;
  ByteRows bytes = {};

  Rows from(int row) const { return {data + row * stride, stride, bytes.data ? bytes.from(row) : bytes}; }
};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int whole_groups(int rows) { return (rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP; }
inline int whole_blocks(int inputs) { return (inputs + BLOCK - 1) / BLOCK * BLOCK; }

// `x` itself if it is whole, else a copy in `scratch`.
template <class E>
Rows<E> readable(const E* x, size_t stride, int rows, int inputs, Memory& scratch) {
  if (inputs % BLOCK == 0 && rows % ROW_GROUP == 0) return {x, stride};
  size_t wide = whole_blocks(inputs);
  E* copy = scratch.at_least<E>(whole_groups(rows) * wide);
  for (int r = 0; r < rows; r++) {
    memcpy(copy + r * wide, x + r * stride, inputs * sizeof(E));
    memset(copy + r * wide + inputs, 0, (wide - inputs) * sizeof(E));
  }
  return {copy, wide};
}
