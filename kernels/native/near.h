// Rows of a layer's cache that were attended lately, in a memory of their own (kernels/indexer.py). The cache, which may be
// the slower memory, has all rows.
#pragma once
#include <cstddef>
#include <cstdint>

#include "engine.h"

// Memory is the caller's to keep alive.
struct NearRows {
  const uint8_t* far;  // the cache's rows, by slot
  uint8_t* rows;       // (capacity, row_bytes)
  size_t row_bytes;
  int capacity;
  int64_t slots;
  int32_t* place_of;  // by slot: where in `rows` it is, or -1
  int32_t* slot_of;   // by place: whose row it is, or -1
  int64_t* used;      // by place: the last call that read it
  int64_t* counts;    // calls, the place that is looked at next, rows found, rows fetched

  // These were written: their rows are fetched anew. Negative ones are nobody's.
  void forget(const int64_t* slot, int tokens) const;

  // The places of rows (tokens, most), of which each token has its first `count`; what is not there is copied, in place of
  // what was read longest ago or nearly so. Throws where they may not fit, or for a slot that there is not.
  void fetch(Engine& engine, const int32_t* slot, const int32_t* count, size_t most, int tokens, int32_t* place) const;
};
