// Products of many rows for processors whose VDPBF16PS is slow: weights and rows are widened once and multiplied as
// floats. VDPBF16PS adds the product of a pair's second numbers, then that of the first, each rounded to even, and takes
// and gives no denormals. Two FMAs in that order under the same rule have its bits, so few rows keep the dot products
// (gemm_avx512bf16.h) and a token has the same bits in any batch. Measured, 512-bit, one core of a Sapphire Rapids class
// Xeon at 2.7 GHz: VDPBF16PS 80 GFLOP/s (one every two cycles), FMA 174.
#pragma once
#include <algorithm>
#include <type_traits>

#include "gemm_avx512bf16.h"

namespace {

constexpr int WIDE_BLOCKS = 4;   // inputs widened at a time, in blocks: 32 KiB of weights
constexpr int WIDE_ROWS = 6;     // rows of one pass: 24 of the 32 registers are sums
constexpr int MOST_LINES = 512;  // words of a key: 1,024 numbers
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

// Widened rows: of each sixteen pairs the second numbers, then the first ones. Distances are in floats.
struct ByRow {
  static constexpr size_t row = WIDE_BLOCKS * BLOCK, half = 16, pair = 1, sixteen = 32;
  const float* x;
};

// The same of the even and of the odd words of up to MOST_LINES words, one after the other.
struct ByLine {
  static constexpr size_t row = 2 * MOST_LINES, half = 16, pair = 1, sixteen = 64;
  const float* x;
};

// R rows of up to 64 pairs; what follows them up to the next sixteen may be read.
template <int R>
INLINE void widen_rows(const bf16* a, size_t stride, int pairs, float* out) {
  for (int r = 0; r < R; r++, out += ByRow::row)
    for (int p = 0; p < pairs; p += 16)
      widen_words(_mm512_loadu_si512(a + r * stride + 2 * p), out + 2 * p, out + 2 * p + 16);
}

// The lines of 4 tiles, `pairs` of each, with line p of tile t at tile[t] + p * step, side by side: of each pair four
// lines of second numbers, then four of first ones.
INLINE void widen_lines(const bf16* const* tile, size_t step, int pairs, float* wide) {
  for (int p = 0; p < pairs; p++, wide += 2 * PANEL)
    for (int t = 0; t < 4; t++) {
      __m512i words = _mm512_loadu_si512(tile[t] + p * step);
      widen_words(words, wide + t * 16, wide + PANEL + t * 16);
    }
}

// How a sum begins, and whether it is added to what is there at its end.
enum class Sum { fresh, on, joined };

// R rows by lines, both widened, of `pairs` pairs.
template <int R, Sum SUM, class X>
NOINLINE void wide_rows(X x, const float* wide, int pairs, float* sum) {
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++)
      total[r][t] = SUM == Sum::on ? _mm512_loadu_ps(sum + r * PANEL + t * 16) : _mm512_setzero_ps();
  for (int done = 0; done < pairs; done += 16, x.x += X::sixteen) {
    const float *some = x.x, *end = wide + std::min(16, pairs - done) * 2 * PANEL;
    for (; wide != end; wide += 2 * PANEL, some += X::pair) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        __m512 w[4];
        for (int t = 0; t < 4; t++) w[t] = _mm512_loadu_ps(wide + half * PANEL + t * 16);
        for (int r = 0; r < R; r++) {
          __m512 v = _mm512_set1_ps(some[r * X::row + half * X::half]);
          for (int t = 0; t < 4; t++) total[r][t] = _mm512_fmadd_ps(v, w[t], total[r][t]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) {
      float* to = sum + r * PANEL + t * 16;
      _mm512_storeu_ps(to, SUM == Sum::joined ? _mm512_add_ps(_mm512_loadu_ps(to), total[r][t]) : total[r][t]);
    }
}

// Calls work(first row, number of them as a constant) for all rows, WIDE_ROWS or fewer at a time.
template <class Work>
INLINE void in_passes(int rows, const Work& work) {
  in_groups(rows, WIDE_ROWS, [&](int r, int n) {
    switch (n) {
      case 1: return work(r, std::integral_constant<int, 1>());
      case 2: return work(r, std::integral_constant<int, 2>());
      case 3: return work(r, std::integral_constant<int, 3>());
      case 4: return work(r, std::integral_constant<int, 4>());
      case 5: return work(r, std::integral_constant<int, 5>());
      case 6: return work(r, std::integral_constant<int, 6>());
    }
  });
}

// All rows, as the caller has them, by lines that are widened: up to 64 pairs.
template <Sum SUM>
void wide_product(const bf16* a, size_t stride, int rows, const float* wide, int pairs, float* sum) {
  in_passes(rows, [&](int r, auto n) {
    constexpr int R = n;
    alignas(64) float x[R * WIDE_BLOCKS * BLOCK];
    widen_rows<R>(a + r * stride, stride, pairs, x);
    wide_rows<R, SUM>(ByRow{x}, wide, pairs, sum + r * PANEL);
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
    auto product = add || b ? wide_product<Sum::on> : wide_product<Sum::fresh>;
    product(a + b * BLOCK, stride, rows, wide, n * BLOCK / 2, sum);
  }
}

void gemm_fma(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next next) {
  if (rows <= FEW_ROWS) return gemm_dp(a, stride, rows, panel, blocks, sum, add, next);
  NoDenormals during;
  gemm_wide(a, stride, rows, panel, blocks, sum, add);
}

// R rows of words: 32 after the other, of which the even ones come first. Words there are none of are zeros.
template <int R>
INLINE void widen_words_of(const bf16* a, size_t stride, int words, float* out) {
  __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  for (int r = 0; r < R; r++, out += ByLine::row)
    for (int w = 0; w < words; w += 32) {
      uint32_t there = words - w < 32 ? (1u << (words - w)) - 1 : ~0u;
      __m512i low = _mm512_maskz_loadu_epi32(there, a + r * stride + 2 * w);
      __m512i high = _mm512_maskz_loadu_epi32(there >> 16, a + r * stride + 2 * w + 32);
      widen_words(_mm512_permutex2var_epi32(low, even, high), out + 2 * w, out + 2 * w + 16);
      widen_words(_mm512_permutex2var_epi32(low, odd, high), out + 2 * w + 32, out + 2 * w + 48);
    }
}

// Four tiles' keys by queries. Even and odd words have a sum each.
void score_wide(const bf16* queries, size_t stride, int rows, const bf16* const* tile, int lines, float* score) {
  alignas(64) float wide[MOST_LINES * PANEL * 2];
  float* wide_odd = wide + lines * PANEL;
  const bf16 *even[4], *odd[4];
  for (int t = 0; t < 4; t++) even[t] = tile[t], odd[t] = tile[t] + 32;
  widen_lines(even, 64, lines / 2, wide);
  widen_lines(odd, 64, lines / 2, wide_odd);
  in_passes(rows, [&](int r, auto n) {
    constexpr int R = n;
    alignas(64) float x[R * ByLine::row];
    widen_words_of<R>(queries + r * stride, stride, lines, x);
    wide_rows<R, Sum::fresh>(ByLine{x}, wide, lines / 2, score + r * PANEL);
    wide_rows<R, Sum::joined>(ByLine{x + 32}, wide_odd, lines / 2, score + r * PANEL);
  });
}

void score_tiles_fma(const bf16* queries, size_t stride, int rows, const bf16* const* tile, const bf16* const* next,
                     int tiles, int lines, float* score, size_t row, size_t step) {
  if (rows <= FEW_ROWS || row != PANEL)
    return score_tiles_dp(queries, stride, rows, tile, next, tiles, lines, score, row, step);
  NoDenormals during;
  for (int t = 0; t < tiles; t += 4) {
    const bf16* four[4];  // past the last, any: nobody reads those scores
    for (int i = 0; i < 4; i++) four[i] = tile[std::min(t + i, tiles - 1)];
    score_wide(queries, stride, rows, four, lines, score + t / 4 * step);
  }
}

void add_values_fma(const bf16* weights, size_t stride, int rows, const bf16* const* tile, const bf16* const* next,
                    int tiles, int first, int size, float* sum) {
  constexpr int pairs = TILE_TOKENS / 2, most = WIDE_BLOCKS * BLOCK / TILE_TOKENS;
  if (rows <= FEW_ROWS || tiles == 1)
    return add_values_dp(weights, stride, rows, tile, next, tiles, first, size, sum);
  NoDenormals during;
  alignas(64) float wide[WIDE_BLOCKS * PANEL_BLOCK];
  for (int done = 0; done < tiles; done += most) {
    int n = std::min(most, tiles - done);
    for (int i = 0; i < n; i++) {
      const bf16* column[4];
      for (int t = 0; t < 4; t++)
        column[t] = tile[done + i] + value_column<bf16>(size, first + t * 16 < size ? first + t * 16 : first);
      widen_lines(column, value_step<bf16>(size), pairs, wide + i * pairs * 2 * PANEL);
    }
    wide_product<Sum::on>(weights + done * TILE_TOKENS, stride, rows, wide, n * pairs, sum);
  }
}

}  // namespace
