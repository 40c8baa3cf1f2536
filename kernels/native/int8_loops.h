// Products with int8 weights (int8.h) widened to the rows' element type: for float rows, and for bf16 rows where no
// instruction multiplies bytes.
#pragma once
#include "int8.h"
#include "vec.h"

namespace {

// Line i of a tile: four inputs of 16 columns, which are floats now.
INLINE void put_line(const f32v (&input)[4], int i, int c, float* wide) {
  for (int j = 0; j < 4; j++) store(wide + i / 8 * PANEL_BLOCK + (i % 8 * 4 + j) * 16 + c, input[j]);
}
INLINE void put_line(const f32v (&input)[4], int i, int c, bf16* wide) {
  for (int j = 0; j < 4; j += 2) {  // numbers below 256 are exact in bf16: the lower halves are zero
    u32v pair = (u32v)input[j] >> 16 | (u32v)input[j + 1];
    store_raw(wide + i / 8 * PANEL_BLOCK + (i % 8 * 2 + j / 2) * 32 + c * 2, pair);
  }
}

// Inputs 4 i to 4 i + 3 of so many columns, a word each.
INLINE u32v four_inputs(const int8_t* tile, int i, int c) {
#if defined(__aarch64__)
  u32v words[2] = {load_raw<u32v>(tile + int8_place(i / 2 * 8, c)), load_raw<u32v>(tile + int8_place(i / 2 * 8, c + 2))};
  return i % 2 ? SHUFFLE(words[0], words[1], 1, 3, 5, 7) : SHUFFLE(words[0], words[1], 0, 2, 4, 6);
#else
  return load_raw<u32v>(tile + int8_place(4 * i, c));
#endif
}

// A tile of 64 inputs to the same tile of two blocks of 32.
template <class E>
INLINE void widen_int8_tile(const int8_t* tile, E* wide) {
  for (int i = 0; i < 16; i++)
    for (int c = 0; c < 16; c += LANES) {
      u32v four = four_inputs(tile, i, c);
      f32v input[4];
      for (int j = 0; j < 4; j++) input[j] = __builtin_convertvector((i32v)(four << (24 - 8 * j)) >> 24, f32v);
      put_line(input, i, c, wide);
    }
}

void scale_columns(float* sum, int rows, const float* scale) {
  for (int r = 0; r < rows; r++, sum += PANEL)
    for (int c = 0; c < PANEL; c += LANES) store(sum + c, load(sum + c) * load(scale + c));
}

template <class E>
void gemm_i8(const E* a, size_t stride, int rows, const Int8Panel& panel, int blocks, float* sum,
             decltype(Loops<E>::gemm) gemm) {
  constexpr int chunk = 4;
  alignas(64) E wide[chunk * PANEL_BLOCK];
  const int8_t* at = panel.data;
  for (int b = 0; b < blocks; b += chunk) {
    int n = blocks - b < chunk ? blocks - b : chunk;
    for (int i = 0; i < n; i += 2, at += INT8_BLOCK)
      for (int t = 0; t < 4; t++) widen_int8_tile(at + t * INT8_TILE, wide + i * PANEL_BLOCK + t * TILE);
    gemm(a + b * BLOCK, stride, rows, wide, n, sum, b > 0, {});
  }
  scale_columns(sum, rows, panel.scale);
}

}  // namespace
