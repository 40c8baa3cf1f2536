// Products of few rows with a group of FP8 codes (fp8.h), which are widened in registers. Sums are added up in the order of
// gemm_avx512bf16.h, so their bits are the same.
#pragma once
#include "fp8_loops.h"
#include "gemm_avx512bf16.h"

namespace {

template <int R>
NOINLINE void fp8_rows_dp(const bf16* a, size_t stride, const char* codes, int blocks, float* product) {
  const Fp8Tables tables;
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) total[r][t] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; b++, a += BLOCK, codes += PANEL_BLOCK) {
#pragma GCC unroll 2
    for (int t = 0; t < 4; t += 2) {
      for (int i = 0; i < TILE / 64; i++) {
        __m512i line[2][2];
        for (int j = 0; j < 2; j++) {
          const char* at = codes + (t + j) * TILE + i * 64;
          widen_fp8_line(at, tables, line[j]);
          _mm_prefetch(at + FP8_AHEAD, _MM_HINT_T0);
        }
#pragma GCC unroll 2
        for (int l = 0; l < 2; l++)
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            __m512bh x = pair_at(a + r * stride + i * 4 + l * 2);
            for (int j = 0; j < 2; j++) total[r][t + j] = _mm512_dpbf16_ps(total[r][t + j], x, (__m512bh)line[j][l]);
          }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) _mm512_storeu_ps(product + r * PANEL + t * 16, total[r][t]);
}

constexpr decltype(&fp8_rows_dp<1>) fp8_some_dp[] = {nullptr, fp8_rows_dp<1>, fp8_rows_dp<2>, fp8_rows_dp<3>,
                                                     fp8_rows_dp<4>};

bool fp8_few_dp(const bf16* a, size_t stride, int rows, const char* codes, int blocks, float* product) {
  if (rows < 1 || rows > 4) return false;
  fp8_some_dp[rows](a, stride, codes, blocks, product);
  return true;
}

}  // namespace
