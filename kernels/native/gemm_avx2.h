// Products of bf16 rows with bf16 panels for AVX2. A word of a panel has two inputs of a column: shifted it is the first as
// a float, masked the second, so nothing is converted. Rows become floats once for all columns, since a number that is
// broadcast from memory costs no arithmetic. Every output has one sum, to which FMAs add inputs in ascending order.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "isa.h"
#include "vec.h"

namespace {

constexpr int ROW_BLOCKS = 4;  // inputs that rows are widened for at a time, in blocks: 16 KiB of weights
constexpr int PASS_ROWS = 6;   // rows of a pass: 12 of the 16 registers are sums
constexpr int WIDE_ROW = ROW_BLOCKS * BLOCK;
constexpr int PLAIN_AHEAD = 8192;  // bytes that are asked for early: 2 KiB is too late (bench/LOG.md)

INLINE __m256 first_of(__m256i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
INLINE __m256 second_of(__m256i words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000))));
}

// `rows` rows of up to ROW_BLOCKS blocks as floats, WIDE_ROW apart.
INLINE void widen_rows(const bf16* a, size_t stride, int rows, int blocks, float* x) {
  for (int r = 0; r < rows; r++, a += stride, x += WIDE_ROW)
    for (int k = 0; k < blocks * BLOCK; k += LANES) store(x + k, load(a + k));
}

// What is asked for while a panel is read: lines `early` bytes further, and past the panel's end what lies at `after`.
struct LinesAhead {
  const char *end, *after;
  size_t early;
  INLINE const char* of(const void* at) const {
    const char* line = static_cast<const char*>(at) + early;
    return line < end ? line : after + (line - end);
  }
};

// The sums of T neighbouring tiles for R rows, of which `x` are so many blocks. Lines are asked for in the order of their
// addresses, which is what prefetchers follow, also where two tiles are read side by side.
template <int R, int T>
INLINE void tiles_by_rows(const float* x, const bf16* tile, int blocks, float* sum, bool add, const LinesAhead& ahead) {
  constexpr int V = 2 * T;
  __m256 total[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) total[r][v] = add ? _mm256_loadu_ps(sum + r * PANEL + v * 8) : _mm256_setzero_ps();
  for (int b = 0; b < blocks; b++, tile += PANEL_BLOCK, x += BLOCK) {
    const char* line = ahead.of(tile);
    const bf16* words = tile;
    for (int k = 0; k < BLOCK; k += 2, words += 32) {
#pragma GCC unroll 2
      for (int t = 0; t < T; t++, line += 64) _mm_prefetch(line, _MM_HINT_T0);
      __m256 w[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        w[v] = first_of(_mm256_loadu_si256((const __m256i*)(words + v / 2 * TILE + v % 2 * 16)));
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        __m256 number = _mm256_broadcast_ss(x + r * WIDE_ROW + k);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[r][v] = _mm256_fmadd_ps(number, w[v], total[r][v]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        w[v] = second_of(_mm256_loadu_si256((const __m256i*)(words + v / 2 * TILE + v % 2 * 16)));
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        __m256 number = _mm256_broadcast_ss(x + r * WIDE_ROW + k + 1);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[r][v] = _mm256_fmadd_ps(number, w[v], total[r][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) _mm256_storeu_ps(sum + r * PANEL + v * 8, total[r][v]);
}

template <int R>
NOINLINE void panel_by_rows(const float* x, const bf16* panel, int blocks, float* sum, bool add, const LinesAhead& ahead) {
  constexpr int together = R < 3 ? 2 : 1;
  for (int t = 0; t < 4; t += together)
    tiles_by_rows<R, together>(x, panel + t * TILE, blocks, sum + t * 16, add, ahead);
}

constexpr decltype(&panel_by_rows<1>) panel_by_some[] = {nullptr,          panel_by_rows<1>, panel_by_rows<2>, panel_by_rows<3>,
                                                         panel_by_rows<4>, panel_by_rows<5>, panel_by_rows<6>};

// Calls work(first row, rows) for all rows, in as few groups of up to PASS_ROWS as there are and all alike.
template <class Work>
INLINE void in_passes(int rows, const Work& work) {
  int passes = (rows + PASS_ROWS - 1) / PASS_ROWS;
  for (int i = 0, r = 0; i < passes; i++) {
    int n = (rows - r) / (passes - i);
    work(r, n);
    r += n;
  }
}

void gemm_avx2(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next next) {
  alignas(64) float x[PASS_ROWS * WIDE_ROW];
  const bf16* end = panel + size_t(blocks) * PANEL_BLOCK;
  const char* after = next.data ? next.data : reinterpret_cast<const char*>(panel);
  LinesAhead ahead{reinterpret_cast<const char*>(end), after, PLAIN_AHEAD};
  for (int b = 0; b < blocks; b += ROW_BLOCKS) {
    int n = std::min(ROW_BLOCKS, blocks - b);
    in_passes(rows, [&](int r, int some) {
      widen_rows(a + r * stride + b * BLOCK, stride, some, n, x);
      panel_by_some[some](x, panel + size_t(b) * PANEL_BLOCK, n, sum + r * PANEL, add || b, ahead);
    });
  }
}

}  // namespace
