// Panel products in vector extensions. One accumulator per output element, inputs in ascending order, so a
// row's sum is the same whatever the number of rows.
#pragma once
#include "isa.h"
#include "vec.h"

namespace {

INLINE void widen_tile(const int8_t* tile, bf16* wide) {
  for (int i = 0; i < TILE; i += LANES) {
    u32v u = (u32v)__builtin_convertvector(load_raw<i8v>(tile + i), f32v) >> 16;
    store_raw(wide + i, __builtin_convertvector(u, u16v));
  }
}

// An int8 tile is in pair order, a float tile is not.
INLINE void widen_tile(const int8_t* tile, float* wide) {
  for (int k = 0; k < BLOCK; k++)
    for (int c = 0; c < 16; c++) wide[k * 16 + c] = tile[k / 2 * 32 + c * 2 + k % 2];
}

template <int R, int T>
INLINE void rows_f32(const float* a, size_t stride, const float* panel, int blocks, float* sum, bool add) {
  f32v total[R][T];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) total[r][t] = add ? load(sum + r * PANEL + t * 16) : f32v{};
  for (int b = 0; b < blocks; b++, a += BLOCK, panel += PANEL_BLOCK) {
    for (int k = 0; k < BLOCK; k++) {
      for (int t = 0; t < T; t++) {
        f32v w = load(panel + t * TILE + k * 16);
        for (int r = 0; r < R; r++) total[r][t] += w * splat(a[r * stride + k]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) store(sum + r * PANEL + t * 16, total[r][t]);
}

template <int R, int T>
INLINE void rows_bf16(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add) {
  f32v total[R][T];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) total[r][t] = add ? load(sum + r * PANEL + t * 16) : f32v{};
  for (int b = 0; b < blocks; b++, a += BLOCK, panel += PANEL_BLOCK) {
    for (int p = 0; p < BLOCK / 2; p++) {
      for (int t = 0; t < T; t++) {
        u32v pair = load_raw<u32v>(panel + t * TILE + p * 32);
        f32v even = (f32v)(pair << 16), odd = (f32v)(pair & 0xffff0000u);
        for (int r = 0; r < R; r++) {
          total[r][t] += even * splat(to_float(a[r * stride + 2 * p]));
          total[r][t] += odd * splat(to_float(a[r * stride + 2 * p + 1]));
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) store(sum + r * PANEL + t * 16, total[r][t]);
}

template <int R>
void panel_rows(const float* a, size_t stride, const float* panel, int blocks, float* sum, bool add) {
  for (int t = 0; t < 4; t += VECTOR_TILES)
    rows_f32<R, VECTOR_TILES>(a, stride, panel + t * TILE, blocks, sum + t * 16, add);
}

template <int R>
void panel_rows(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add) {
  for (int t = 0; t < 4; t += VECTOR_TILES)
    rows_bf16<R, VECTOR_TILES>(a, stride, panel + t * TILE, blocks, sum + t * 16, add);
}

template <class E>
void gemm_vector(const E* a, size_t stride, int rows, const E* panel, int blocks, float* sum, bool add) {
  int r = 0;
  for (; r + VECTOR_ROWS <= rows; r += VECTOR_ROWS)
    panel_rows<VECTOR_ROWS>(a + r * stride, stride, panel, blocks, sum + r * PANEL, add);
  for (; r < rows; r++) panel_rows<1>(a + r * stride, stride, panel, blocks, sum + r * PANEL, add);
}

}  // namespace
