// Products with rows of a cache in int8 (eight.h) where they lie: whole numbers, which are exact, and scales behind them.
// What would be floats otherwise are whole numbers of 15 bits, each row of queries and a tile's weights of a row with a scale
// of their own: finer than bf16, and the same whoever shares the batch.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "element.h"

// Rows of queries as VPDPWSSD takes them: of each four codes the pairs (first, third) and (second, fourth), row by row.
struct CodeQueries {
  int32_t* word;  // [size / 4][2][rows]
  float* scale;   // by row; NaN where a number is not finite
  int rows;
};
