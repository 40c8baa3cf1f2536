// Panel products with VDPBF16PS. Same order of sums for any number of rows.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "isa.h"
#include "tiles.h"
#include "vec.h"

namespace {

INLINE __m512bh pair_at(const bf16* x) {
  int pair;
  memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// With NEXT `next` is asked for, a line a pair; else the panel's own lines, which come from memory then.
template <int R, bool NEXT>
NOINLINE void rows_dp(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add, const char* next) {
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++)
      total[r][t] = add ? _mm512_loadu_ps(sum + r * PANEL + t * 16) : _mm512_setzero_ps();
  const bf16* end = panel + size_t(blocks) * PANEL_BLOCK;
  do {  // as a `for` loop, GCC would move all sums through memory at both ends
    const bf16 *end_of_tile = panel + TILE, *own = panel + PANEL_BLOCK / 2;
    do {
      __m512bh w[4];
      for (int t = 0; t < 4; t++) w[t] = (__m512bh)_mm512_loadu_si512(panel + t * TILE);
      if (NEXT)
        _mm_prefetch(next, _MM_HINT_T1), next += 64;
      else
        for (int t = 0; t < 4; t++)
          _mm_prefetch((const char*)own, _MM_HINT_T0), own += 32;
      for (int r = 0; r < R; r++) {
        __m512bh x = pair_at(a + r * stride);
        for (int t = 0; t < 4; t++) total[r][t] = _mm512_dpbf16_ps(total[r][t], x, w[t]);
      }
      a += 2, panel += 32;
    } while (panel != end_of_tile);
    panel += PANEL_BLOCK - TILE;
  } while (panel != end);
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) _mm512_storeu_ps(sum + r * PANEL + t * 16, total[r][t]);
}

// Tiles of a cache are read line by line in the order of their addresses, which is what prefetchers follow, so each line
// of keys goes to the next of two sums. Meanwhile as many lines of `next` are asked for. Queries lie word by word.
template <int R, bool ASK>
NOINLINE void score_rows(const bf16* queries, size_t stride, const bf16* tile, const bf16* next, int lines,
                         float* score, size_t row) {
  __m512 total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
  const bf16* end = tile + lines * 32;
  do {
    for (int i = 0; i < 2; i++, tile += 32, next += 32, queries += stride) {
      __m512bh w = (__m512bh)_mm512_loadu_si512(tile);
      if (ASK) _mm_prefetch((const char*)next, _MM_HINT_T1);
      for (int r = 0; r < R; r++) total[r][i] = _mm512_dpbf16_ps(total[r][i], w, pair_at(queries + 2 * r));
    }
  } while (tile != end);
  for (int r = 0; r < R; r++) _mm512_storeu_ps(score + r * row, _mm512_add_ps(total[r][0], total[r][1]));
}

// Eight token pairs of each tile, in four columns of sixteen at at[0 .. 3]; the next pair is `step` elements on.
template <int R, bool ASK>
NOINLINE void value_rows(const bf16* weights, size_t stride, const bf16* const* tile, const bf16* const* next,
                         int tiles, const int* at, size_t step, float* sum) {
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) total[r][t] = _mm512_loadu_ps(sum + r * PANEL + t * 16);
  const bf16* const* end = tile + tiles;
  do {
    const bf16 *c0 = *tile + at[0], *c1 = *tile + at[1], *c2 = *tile + at[2], *c3 = *tile + at[3];
    const char* ahead = ASK ? (const char*)(*next++ + at[0]) : nullptr;
    for (int p = 0; p < TILE_TOKENS / 2; p++, weights += 2) {
      __m512bh w[4] = {(__m512bh)_mm512_loadu_si512(c0), (__m512bh)_mm512_loadu_si512(c1),
                       (__m512bh)_mm512_loadu_si512(c2), (__m512bh)_mm512_loadu_si512(c3)};
      if (ASK)
        for (int t = 0; t < 4; t++) _mm_prefetch(ahead + (p * 4 + t) * 64, _MM_HINT_T1);
      for (int r = 0; r < R; r++) {
        __m512bh x = pair_at(weights + r * stride);
        for (int t = 0; t < 4; t++) total[r][t] = _mm512_dpbf16_ps(total[r][t], x, w[t]);
      }
      c0 += step, c1 += step, c2 += step, c3 += step;
    }
  } while (++tile != end);
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) _mm512_storeu_ps(sum + r * PANEL + t * 16, total[r][t]);
}

template <bool ASK>
constexpr decltype(&score_rows<1, ASK>) score_some[] = {
    nullptr,            score_rows<1, ASK>, score_rows<2, ASK>, score_rows<3, ASK>, score_rows<4, ASK>,
    score_rows<5, ASK>, score_rows<6, ASK>, score_rows<7, ASK>, score_rows<8, ASK>};
template <bool ASK>
constexpr decltype(&value_rows<1, ASK>) value_some[] = {
    nullptr,            value_rows<1, ASK>, value_rows<2, ASK>, value_rows<3, ASK>,
    value_rows<4, ASK>, value_rows<5, ASK>, value_rows<6, ASK>};

// Calls work(first row, rows) for all rows, in as few groups of up to `most` as there are and all alike.
template <class Work>
INLINE void in_groups(int rows, int most, const Work& work) {
  if (rows <= most) return work(0, rows);
  int groups = (rows + most - 1) / most;
  for (int i = 0, r = 0; i < groups; i++) {
    int n = (rows - r) / (groups - i);
    work(r, n);
    r += n;
  }
}

// Every group of rows asks: a core drops what it can't take at once.
void score_tiles_dp(const bf16* queries, size_t stride, int rows, const bf16* const* tile, const bf16* const* next,
                    int tiles, int lines, float* score, size_t row, size_t step) {
  auto* some = *next ? score_some<true> : score_some<false>;
  for (int t = 0; t < tiles; t++) {
    float* to = score + t / 4 * step + t % 4 * TILE_TOKENS;
    in_groups(rows, 8, [&](int r, int n) {
      some[n](queries + 2 * r, stride, tile[t], next[t], lines, to + r * row, row);
    });
  }
}

void add_values_dp(const bf16* weights, size_t stride, int rows, const bf16* const* tile, const bf16* const* next,
                   int tiles, int first, int size, float* sum) {
  int at[4];
  for (int t = 0; t < 4; t++) at[t] = value_column<bf16>(size, first + t * 16 < size ? first + t * 16 : first);
  auto* some = *next ? value_some<true> : value_some<false>;
  in_groups(rows, 6, [&](int r, int n) {
    some[n](weights + r * stride, stride, tile, next, tiles, at, value_step<bf16>(size), sum + r * PANEL);
  });
}

template <bool NEXT>
constexpr decltype(&rows_dp<1, NEXT>) rows_some[] = {nullptr,          rows_dp<1, NEXT>, rows_dp<2, NEXT>, rows_dp<3, NEXT>,
                                                     rows_dp<4, NEXT>, rows_dp<5, NEXT>, rows_dp<6, NEXT>};

// With many rows the first groups ask for what is next, each for so many lines as it has the time for.
void gemm_dp(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next next) {
  const char *ask = next.lines && rows > 2 * ROW_GROUP ? next.data : nullptr, *end = next.data + next.lines * 64;
  auto* some = ask ? rows_some<true> : rows_some<false>;
  for (; rows > 0; rows -= 6, a += 6 * stride, sum += 6 * PANEL) {
    some[std::min(rows, 6)](a, stride, panel, blocks, sum, add, ask);
    if (ask && ask < end) ask += blocks * BLOCK / 2 * 64;
  }
}

}  // namespace
