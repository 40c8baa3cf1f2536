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
        _mm_prefetch((const char*)(panel + t * TILE + p * 32 + 2 * PANEL_BLOCK), _MM_HINT_T0);
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
