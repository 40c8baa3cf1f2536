// Rows of an embedding by token: numbers, or one of ggml's types as a file has it (ggml.h).
#pragma once
#include "engine.h"

struct Embedding {
  static constexpr int NUMBERS = -1;  // of the rows' dtype; any other `type` is a GgmlType
  const void* data;                   // the caller's to keep alive
  int rows, size, type;

  // out[count][size]. Throws std::out_of_range for a token that has no row.
  template <class E>
  void read(Engine& engine, const int64_t* token, int count, E* out) const;
};
