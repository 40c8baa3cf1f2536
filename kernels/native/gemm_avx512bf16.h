// Panel products with VDPBF16PS. Same order of sums for any number of rows.
#pragma once
#include <immintrin.h>

#include "isa.h"
#include "vec.h"

namespace {

template <int R>
void rows_dp(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add) {
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++)
      total[r][t] = add ? _mm512_loadu_ps(sum + r * PANEL + t * 16) : _mm512_setzero_ps();
  for (int b = 0; b < blocks; b++, a += BLOCK, panel += PANEL_BLOCK) {
    for (int p = 0; p < BLOCK / 2; p++) {
      __m512bh w[4];
      for (int t = 0; t < 4; t++) {
        w[t] = (__m512bh)_mm512_loadu_si512(panel + t * TILE + p * 32);
        _mm_prefetch((const char*)(panel + PANEL_BLOCK / 2 + (p * 4 + t) * 32), _MM_HINT_T0);
      }
      for (int r = 0; r < R; r++) {
        int pair;
        memcpy(&pair, a + r * stride + 2 * p, 4);
        __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        for (int t = 0; t < 4; t++) total[r][t] = _mm512_dpbf16_ps(total[r][t], x, w[t]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) _mm512_storeu_ps(sum + r * PANEL + t * 16, total[r][t]);
}

// `lines` words of inputs of four columns of sixteen; meanwhile four tiles' parts of as many lines are asked for, one
// after the other.
template <int R>
INLINE void add_lines(__m512 (&total)[R][4], const bf16* a, size_t stride, const bf16* const* column,
                      const bf16* next, int lines) {
  const bf16 *c0 = column[0], *c1 = column[1], *c2 = column[2], *c3 = column[3];
  for (int p = 0; p < lines; p++) {
    __m512bh w[4] = {(__m512bh)_mm512_loadu_si512(c0 + p * 32), (__m512bh)_mm512_loadu_si512(c1 + p * 32),
                     (__m512bh)_mm512_loadu_si512(c2 + p * 32), (__m512bh)_mm512_loadu_si512(c3 + p * 32)};
    const char* ahead = (const char*)(next + p * 128);
    for (int i = 0; i < 4; i++) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
    for (int r = 0; r < R; r++) {
      int pair;
      memcpy(&pair, a + r * stride + 2 * p, 4);
      __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      for (int t = 0; t < 4; t++) total[r][t] = _mm512_dpbf16_ps(total[r][t], x, w[t]);
    }
  }
}

template <int R>
struct TileRows {
  static void score(const bf16* queries, size_t stride, const bf16* const* tile, const bf16* const* next, int lines,
                    float* score) {
    __m512 total[R][4] = {};
    const bf16* column[4];
    for (int i = 0, done = 0; i < 4; done += lines / 4, i++) {
      for (int t = 0; t < 4; t++) column[t] = tile[t] + done * 32;
      add_lines<R>(total, queries + done * 2, stride, column, next[i], lines / 4);
    }
    store(total, score);
  }

  static void add(const bf16* weights, size_t stride, const bf16* const* tile, const bf16* const* next, int tiles,
                  const int* at, float* sum) {
    __m512 total[R][4];
    for (int r = 0; r < R; r++)
      for (int t = 0; t < 4; t++) total[r][t] = _mm512_loadu_ps(sum + r * PANEL + t * 16);
    for (int i = 0; i < tiles; i++) {
      const bf16* column[4];
      for (int t = 0; t < 4; t++) column[t] = tile[i] + at[t];
      add_lines<R>(total, weights + i * 16, stride, column, next[i] + at[0], 8);
    }
    store(total, sum);
  }

  static INLINE void store(const __m512 (&total)[R][4], float* out) {
    for (int r = 0; r < R; r++)
      for (int t = 0; t < 4; t++) _mm512_storeu_ps(out + r * PANEL + t * 16, total[r][t]);
  }
};

// Calls work(TileRows<R>, first row) for all rows, six at a time.
template <class Work>
INLINE void by_six(int rows, const Work& work) {
  int r = 0;
  for (; r + 6 <= rows; r += 6) work(TileRows<6>{}, r);
  switch (rows - r) {
    case 1: return work(TileRows<1>{}, r);
    case 2: return work(TileRows<2>{}, r);
    case 3: return work(TileRows<3>{}, r);
    case 4: return work(TileRows<4>{}, r);
    case 5: return work(TileRows<5>{}, r);
  }
}

void score_tiles_dp(const bf16* queries, size_t stride, int rows, const bf16* const* tile, const bf16* const* next,
                    int lines, float* score) {
  by_six(rows, [&](auto some, int r) { some.score(queries + r * stride, stride, tile, next, lines, score + r * PANEL); });
}

void add_values_dp(const bf16* weights, size_t stride, int rows, const bf16* const* tile, const bf16* const* next, int tiles,
                   int first, int size, float* sum) {
  int at[4];
  for (int t = 0; t < 4; t++) at[t] = (first + t * 16 < size ? first + t * 16 : first) * 16;
  by_six(rows, [&](auto some, int r) { some.add(weights + r * stride, stride, tile, next, tiles, at, sum + r * PANEL); });
}

void gemm_dp(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next) {
  for (; rows >= 6; rows -= 6, a += 6 * stride, sum += 6 * PANEL) rows_dp<6>(a, stride, panel, blocks, sum, add);
  switch (rows) {
    case 1: return rows_dp<1>(a, stride, panel, blocks, sum, add);
    case 2: return rows_dp<2>(a, stride, panel, blocks, sum, add);
    case 3: return rows_dp<3>(a, stride, panel, blocks, sum, add);
    case 4: return rows_dp<4>(a, stride, panel, blocks, sum, add);
    case 5: return rows_dp<5>(a, stride, panel, blocks, sum, add);
  }
}

}  // namespace
