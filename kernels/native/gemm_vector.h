// Panel products in vector extensions. One accumulator per output element, inputs in ascending order, so a
// row's sum is the same whatever the number of rows. The including file says how many accumulators fit:
// GEMM_ROWS rows of GEMM_VECTORS vectors.
#pragma once
#include "isa.h"
#include "vec.h"

namespace {

// Where column vector j begins in a block, and how far its next input (or pair of inputs) is.
constexpr int vector_at(int j) { return j * LANES / 16 * TILE + j * LANES % 16; }

template <int R, int C>
INLINE void rows_of(const float* a, size_t stride, const float* panel, int blocks, float* sum, int first, bool add) {
  f32v total[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) total[r][c] = add ? load(sum + r * PANEL + (first + c) * LANES) : f32v{};
  for (int b = 0; b < blocks; b++, a += BLOCK, panel += PANEL_BLOCK) {
    for (int k = 0; k < BLOCK; k++) {
      for (int c = 0; c < C; c++) {
        f32v w = load(panel + vector_at(first + c) + k * 16);
        for (int r = 0; r < R; r++) total[r][c] += w * splat(a[r * stride + k]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(sum + r * PANEL + (first + c) * LANES, total[r][c]);
}

template <int R, int C>
INLINE void rows_of(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, int first, bool add) {
  f32v total[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) total[r][c] = add ? load(sum + r * PANEL + (first + c) * LANES) : f32v{};
  for (int b = 0; b < blocks; b++, a += BLOCK, panel += PANEL_BLOCK) {
    for (int p = 0; p < BLOCK / 2; p++) {
      for (int c = 0; c < C; c++) {
        int at = (first + c) * LANES / 16 * TILE + (first + c) * LANES % 16 * 2 + p * 32;
        u32v pair = load_raw<u32v>(panel + at);
        f32v even = (f32v)(pair << 16), odd = (f32v)(pair & 0xffff0000u);
        for (int r = 0; r < R; r++) {
          total[r][c] += even * splat(to_float(a[r * stride + 2 * p]));
          total[r][c] += odd * splat(to_float(a[r * stride + 2 * p + 1]));
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(sum + r * PANEL + (first + c) * LANES, total[r][c]);
}

template <int R, int C, class E>
void panel_rows(const E* a, size_t stride, const E* panel, int blocks, float* sum, bool add) {
  for (int first = 0; first < PANEL / LANES; first += C) rows_of<R, C>(a, stride, panel, blocks, sum, first, add);
}

// The last `rows` rows, fewer than GEMM_ROWS: weights are widened once for all of them. One row goes through a panel once.
template <int R, class E>
INLINE void last_rows(const E* a, size_t stride, int rows, const E* panel, int blocks, float* sum, bool add) {
  constexpr int most = PANEL / LANES < 8 ? PANEL / LANES : 8;
  if constexpr (R > 0) {
    if (rows == R) return panel_rows<R, R == 1 ? most : GEMM_VECTORS>(a, stride, panel, blocks, sum, add);
    last_rows<R - 1>(a, stride, rows, panel, blocks, sum, add);
  }
}

template <class E>
void gemm_vector(const E* a, size_t stride, int rows, const E* panel, int blocks, float* sum, bool add, Next) {
  int r = 0;
  for (; r + GEMM_ROWS <= rows; r += GEMM_ROWS)
    panel_rows<GEMM_ROWS, GEMM_VECTORS>(a + r * stride, stride, panel, blocks, sum + r * PANEL, add);
  last_rows<GEMM_ROWS - 1>(a + r * stride, stride, rows - r, panel, blocks, sum + r * PANEL, add);
}

}  // namespace
