// A panel of bf16 weights in 12 bits each, without loss: a stream of weights is bound by memory, so a quarter less to
// read is a quarter less time. Trained weights use few exponents; the high byte of a bf16 (sign and seven bits of
// exponent) is one of 16 in all but some 1 of 10,000. Those 16 stand at the panel's head, each weight keeps its low
// byte and 4 bits that say which, and the others are patched after expansion. Source: the entropy of bf16 exponents
// is 2.6 bits (DFloat11, arXiv 2504.11651); a fixed width keeps the expansion to three shuffles per 64 weights.
//
// A unit is 128 weights, two lines of 32 twice: 64 bytes of codes (the first 64 weights in the low halves), then 2 x 64
// low bytes. In 64 bytes, lane l holds elements 8 l .. 8 l + 7 of the first line, then those of the second, because
// unpacking bytes within lanes of 16 is what processors do fast.
#pragma once
#include <vector>

#include "isa.h"
#include "memory.h"

constexpr int UNIT = 128;                                      // weights
constexpr int UNIT_BYTES = UNIT + UNIT / 2;                    // what they take
constexpr int BLOCK_UNITS = PANEL_BLOCK / UNIT;                // units of one block of a panel
constexpr int COMPACT_HEAD = 64;                               // the 16 high bytes, on a line of their own

// What the units of one panel do not say.
class CompactPanel {
 public:
  static size_t bytes(int blocks) { return COMPACT_HEAD + size_t(blocks) * BLOCK_UNITS * UNIT_BYTES; }

  // Writes `bytes(blocks)` at `to`.
  void pack(const Isa& isa, const bf16* panel, int blocks, char* to);

  // Nothing is packed any more.
  void clear() { patches_ = {}, whole_.resize(0); }

  // sum[rows][64] = a * panel, with the bits of the product with the panel that was packed. `after`: the panel that
  // this thread will most likely read next; a hint.
  void multiply(const Isa& isa, const char* at, const bf16* a, size_t stride, int rows, int blocks, float* sum,
                const char* after) const;

 private:
  std::vector<Patch> patches_;  // ascending
  Memory whole_;                // the panel itself, when patches would outweigh what is saved
};
