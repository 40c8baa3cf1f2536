// Products of few rows with a group of FP8 codes (fp8.h), which are widened in registers. Sums are added up in the order of
// gemm_avx2.h, so their bits are the same.
#pragma once
#include "fp8_loops.h"
#include "gemm_avx2.h"

namespace {

// T neighbouring tiles of all blocks.
template <int R, int T>
INLINE void fp8_tiles(const float* x, const char* codes, int blocks, const Fp8Tables& tables, float* product) {
  __m256 total[R][2 * T];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < 2 * T; v++) total[r][v] = _mm256_setzero_ps();
  for (int b = 0; b < blocks; b++, x += BLOCK, codes += PANEL_BLOCK)
    for (int i = 0; i < TILE / 64; i++) {
#pragma GCC unroll 2
      for (int t = 0; t < T; t++) {
        const char* at = codes + t * TILE + i * 64;
        _mm_prefetch(at + FP8_AHEAD, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          __m256i line[2];
          widen_fp8_half(at + 32 * v, tables, line);
#pragma GCC unroll 2
          for (int l = 0; l < 2; l++) {
            __m256 first = first_of(line[l]), second = second_of(line[l]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
              const float* number = x + r * WIDE_ROW + i * 4 + l * 2;
              __m256& sum = total[r][t * 2 + v];
              sum = _mm256_fmadd_ps(_mm256_broadcast_ss(number), first, sum);
              sum = _mm256_fmadd_ps(_mm256_broadcast_ss(number + 1), second, sum);
            }
          }
        }
      }
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < 2 * T; v++) _mm256_storeu_ps(product + r * PANEL + v * 8, total[r][v]);
}

template <int R>
NOINLINE void fp8_by_rows(const float* x, const char* codes, int blocks, float* product) {
  constexpr int T = R == 1 ? 2 : 1;
  const Fp8Tables tables;
  for (int t = 0; t < 4; t += T) fp8_tiles<R, T>(x, codes + t * TILE, blocks, tables, product + t * 16);
}

constexpr decltype(&fp8_by_rows<1>) fp8_by_some[] = {nullptr, fp8_by_rows<1>, fp8_by_rows<2>, fp8_by_rows<3>, fp8_by_rows<4>};

bool fp8_few_avx2(const bf16* a, size_t stride, int rows, const char* codes, int blocks, float* product) {
  if (rows < 1 || rows > 4) return false;
  alignas(64) float x[4 * WIDE_ROW];
  widen_rows(a, stride, rows, blocks, x);
  fp8_by_some[rows](x, codes, blocks, product);
  return true;
}

}  // namespace
