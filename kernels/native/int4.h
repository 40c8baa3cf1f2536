// Weights of 4 bits: numbers with one scale per output and group of inputs. How a panel of them lies. The numbers are -8 .. 7
// in two's complement, or twice those of e2m1 (OCP MX v1.0): a sign, and 0 1 2 3 4 6 8 12 by the other three bits.
//
// A group's scales and its blocks lie one after the other, so a panel is one stream. A block has four tiles of 256 bytes. A
// tile is four lines of 32 words of 16 bits; word w of line i has, lowest first, the codes of word w of lines 4 i to
// 4 i + 3 of a bf16 tile (isa.h). So one shuffle of words makes a line of bf16. A number in two's complement lies there plus 8.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "isa.h"

constexpr int INT4_TILE = TILE / 2;           // bytes
constexpr int INT4_BLOCK = PANEL_BLOCK / 2;   // bytes
constexpr int INT4_LINES = TILE / 32 / 4;     // of a tile

#if defined(__aarch64__)
constexpr int int4_byte(int k, int column) { return column / 4 * 64 + k / 16 * 32 + column % 4 * 8 + k % 8; }
#endif

// How inputs are grouped: `inputs` to a scale, a multiple of BLOCK. Scales are float if `wide`, else rounded to bf16.
struct Groups {
  int inputs = BLOCK;
  bool wide = false;
  bool e2m1 = false;

  int blocks() const { return inputs / BLOCK; }
  size_t scale_bytes() const { return PANEL * (wide ? 4 : 2); }
  size_t panel_bytes(int blocks_of_panel) const {
    int groups = (blocks_of_panel + blocks() - 1) / blocks();
    return groups * scale_bytes() + size_t(blocks_of_panel) * INT4_BLOCK;
  }
};

constexpr int8_t E2M1_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A matrix as the caller has it: a byte per number, and the scales of each row's groups.
struct Int4Source {
  const int8_t* codes;
  const float* scales;
};
