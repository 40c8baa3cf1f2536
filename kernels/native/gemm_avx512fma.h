// Products of many rows for processors whose VDPBF16PS is slow: weights and rows are widened once and multiplied as
// floats. VDPBF16PS adds the product of a pair's second numbers, then that of the first, each rounded to even, and takes
// and gives no denormals. Two FMAs in that order under the same rule have its bits, so few rows keep the dot products
// (gemm_avx512bf16.h) and a token has the same bits in any batch. Measured, 512-bit, one core of a Sapphire Rapids class
// Xeon at 2.7 GHz: VDPBF16PS 80 GFLOP/s (one every two cycles), FMA 174.
#pragma once
#include <algorithm>

#include "gemm_avx512bf16.h"

namespace {

constexpr int WIDE_BLOCKS = 4;   // inputs widened at a time, in blocks: 32 KiB of weights
constexpr int WIDE_ROWS = 6;     // rows of one pass: 24 of the 32 registers are sums
constexpr int FEW_ROWS = 4;      // so few are faster as dot products

// No denormals, as VDPBF16PS has none. Results are stored before the end of its life.
class NoDenormals {
 public:
  NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~NoDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

// Words of two bf16 as two lines of floats: the second numbers, which are multiplied first, then the first ones.
INLINE void widen_words(__m512i words, float* second, float* first) {
  _mm512_storeu_ps(second, (__m512)_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
  _mm512_storeu_ps(first, (__m512)_mm512_slli_epi32(words, 16));
}

// `pairs` (a multiple of 16) pairs of R rows: of each sixteen the second numbers, then the first ones.
template <int R>
INLINE void widen_rows(const bf16* a, size_t stride, int pairs, float* out) {
  for (int r = 0; r < R; r++, out += 2 * pairs)
    for (int p = 0; p < pairs; p += 16)
      widen_words(_mm512_loadu_si512(a + r * stride + 2 * p), out + 2 * p, out + 2 * p + 16);
}

// The lines of 4 tiles, `steps` pairs each, with line p of tile t at tile[t] + p * step, side by side: of each pair four
// lines of second numbers, then four of first ones.
INLINE void widen_lines(const bf16* const* tile, size_t step, int pairs, float* wide) {
  for (int p = 0; p < pairs; p++, wide += 2 * PANEL)
    for (int t = 0; t < 4; t++) {
      __m512i words = _mm512_loadu_si512(tile[t] + p * step);
      widen_words(words, wide + t * 16, wide + PANEL + t * 16);
    }
}

// sum[R][64] (+)= rows * lines, both widened, of `pairs` pairs.
template <int R>
NOINLINE void wide_rows(const float* x, const float* wide, int pairs, float* sum, bool add) {
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) total[r][t] = add ? _mm512_loadu_ps(sum + r * PANEL + t * 16) : _mm512_setzero_ps();
  for (int done = 0; done < pairs; done += 16) {
    for (int p = 0; p < 16; p++, wide += 2 * PANEL) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        __m512 w[4];
        for (int t = 0; t < 4; t++) w[t] = _mm512_loadu_ps(wide + half * PANEL + t * 16);
        for (int r = 0; r < R; r++) {
          __m512 v = _mm512_set1_ps(x[2 * (r * pairs + done) + half * 16 + p]);
          for (int t = 0; t < 4; t++) total[r][t] = _mm512_fmadd_ps(v, w[t], total[r][t]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) _mm512_storeu_ps(sum + r * PANEL + t * 16, total[r][t]);
}

template <int R>
INLINE void wide_pass(const bf16* a, size_t stride, const float* wide, int pairs, float* sum, bool add) {
  alignas(64) float x[R * WIDE_BLOCKS * BLOCK];
  widen_rows<R>(a, stride, pairs, x);
  wide_rows<R>(x, wide, pairs, sum, add);
}

// All rows by what is widened of the other side.
void wide_product(const bf16* a, size_t stride, int rows, const float* wide, int pairs, float* sum, bool add) {
  auto* pass = wide_pass<WIDE_ROWS>;
  in_groups(rows, WIDE_ROWS, [&](int r, int n) {
    switch (n) {
      case 1: pass = wide_pass<1>; break;
      case 2: pass = wide_pass<2>; break;
      case 3: pass = wide_pass<3>; break;
      case 4: pass = wide_pass<4>; break;
      case 5: pass = wide_pass<5>; break;
      default: pass = wide_pass<6>;
    }
    pass(a + r * stride, stride, wide, pairs, sum + r * PANEL, add);
  });
}

NOINLINE void gemm_wide(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add) {
  alignas(64) float wide[WIDE_BLOCKS * PANEL_BLOCK];
  for (int b = 0; b < blocks; b += WIDE_BLOCKS) {
    int n = std::min(WIDE_BLOCKS, blocks - b);
    for (int i = 0; i < n; i++) {
      const bf16* at = panel + (b + i) * PANEL_BLOCK;
      const bf16* tile[] = {at, at + TILE, at + 2 * TILE, at + 3 * TILE};
      widen_lines(tile, 32, BLOCK / 2, wide + i * PANEL_BLOCK);
    }
    wide_product(a + b * BLOCK, stride, rows, wide, n * BLOCK / 2, sum, add || b > 0);
  }
}

void gemm_fma(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next next) {
  if (rows <= FEW_ROWS) return gemm_dp(a, stride, rows, panel, blocks, sum, add, next);
  NoDenormals during;
  gemm_wide(a, stride, rows, panel, blocks, sum, add);
}

}  // namespace
