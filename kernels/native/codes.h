// Products with rows of a cache in int8 (eight.h) where they lie: whole numbers, which are exact, and scales behind them.
// What would be floats otherwise are whole numbers of 15 bits, each row of queries and a tile's weights of a row with a scale
// of their own: finer than bf16, and the same whoever shares the batch.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "element.h"

constexpr float MOST_WHOLE = 127 * 256 + 127;  // of which high and low bytes are numbers with a sign
constexpr int MOST_CODES = 1024;  // of a row of keys
constexpr float MOST_SUM = 2147483647.0f / 127.0f;  // of the whole numbers that codes are multiplied by

// Rows of queries as an instruction set takes them, 2 bytes for each number. VPDPBUSD: of each row the high bytes, then the low
// ones, both with a sign. AMX: codes_amx.h.
struct CodeQueries {
  int32_t* word;  // [rows][2][size / 4]; of AMX, [rows / 16][size / 64][2][16][16]
  float* scale;   // by row, of as many as are padded; NaN where a number is not finite
  int rows;
};

// What codes of a tile's sixteen tokens stand for, by token: the first `count` of a row of keys, and those behind them.
struct CodeScales {
  int count;
  const float *first, *others;
};

// What makes a row's numbers whole ones, of which sums of products with codes fit into 32 bits; `scale` is what one of these is
// worth. 0 where a number is not finite.
static inline float whole_factor(const bf16* x, int size, float* scale) {
  uint16_t top = 0;  // of magnitudes' bits, which are in their order
  for (int i = 0; i < size; i++) {
    uint16_t bits = x[i].bits & 0x7fff;
    top = bits > top ? bits : top;
  }
  const bool finite = top < 0x7f80;
  const float most = to_float(bf16{top});
  float fits = floorf(MOST_SUM / size), largest = MOST_WHOLE < fits ? MOST_WHOLE : fits;
  *scale = finite ? most / largest : NAN;
  return finite && most > 0 ? largest / most : 0.0f;
}
