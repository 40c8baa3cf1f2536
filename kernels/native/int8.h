// Weights of 8 bits: whole numbers -127 .. 127 with one scale per output, and rows as whole numbers of 16 bits, or with AVX2
// of 8 bits with a scale for every 32.
//
// A panel has blocks of 64 inputs, a block has four tiles of 16 columns, and a tile has 16 lines of four inputs, which is
// what TDPBUSD and VPDPBUSD multiply; on Arm each four columns have 8 lines of eight inputs, of which SMMLA multiplies two columns.
#pragma once
#include <stddef.h>
#include <stdint.h>

constexpr int INT8_INPUTS = 64;            // of a block
constexpr int INT8_TILE = 1024;            // bytes
constexpr int INT8_BLOCK = 4 * INT8_TILE;  // bytes
constexpr int MOST_INT8_INPUTS = 1 << 16;  // sums of so many products of bytes fit 32 bits

// Where number (k, column) of a tile lies.
#if defined(__aarch64__)
constexpr int int8_place(int k, int column) { return column / 4 * 256 + k / 8 * 32 + column % 4 * 8 + k % 8; }
#else
constexpr int int8_place(int k, int column) { return k / 4 * 64 + column * 4 + k % 4; }
#endif

inline int int8_blocks(int inputs) { return (inputs + INT8_INPUTS - 1) / INT8_INPUTS; }

// correction[c] = 128 * the sum of column c's weights.
struct Int8Panel {
  const int8_t* data;
  int blocks;
  const float* scale;
  const int32_t* correction;
};

// Row r is (number - 32768) * scale[r], a row of the numbers' high bytes at data + 2 r * stride and one of their low bytes
// at data + (2 r + 1) * stride; or number * scale[r], where an instruction set multiplies 16 bits at a time, and the numbers
// take both places (rows_neon.h); or as bytes_avx2.h has it. Rows are read in sixteens, so there is room past the last.
struct ByteRows {
  uint8_t* data = nullptr;
  size_t stride = 0;
  float* scale = nullptr;

  ByteRows from(int row) const { return {data + 2 * row * stride, stride, scale + row}; }
};
