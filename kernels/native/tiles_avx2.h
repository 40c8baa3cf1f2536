// Products of bf16 rows with tiles of a cache (tiles.h) where they lie, for AVX2. Every output has the sum that gemm_avx2.h
// would have from a panel, inputs in the same order, so nothing is copied and nothing rounds otherwise.
#pragma once
#include "gemm_avx2.h"
#include "tiles.h"

namespace {

// Tiles, or sixteens of columns, that R rows multiply side by side: few rows need more of them to keep both multipliers busy.
template <int R>
constexpr int BESIDE = R == 1 ? 4 : R == 2 ? 2 : 1;

// total[r][..] += rows of numbers, WIDE_ROW apart, times so many lines of T sixteens of columns. A line has two inputs of 16
// columns and lies `step` elements behind the one before; lines of `next` are asked for.
template <int R, int T, bool ASK>
INLINE void add_lines(const float* x, const bf16* const (&column)[T], const bf16* const (&next)[T], size_t step, int lines,
                      __m256 (&total)[R][2 * T]) {
  constexpr int V = 2 * T;
  for (int i = 0; i < lines; i++, x += 2) {
    const size_t at = i * step;
#pragma GCC unroll 4
    for (int t = 0; ASK && t < T; t++) __builtin_prefetch(next[t] + at, 0, 2);
#pragma GCC unroll 2
    for (int input = 0; input < 2; input++) {
      __m256 w[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        __m256i words = _mm256_loadu_si256((const __m256i*)(column[v / 2] + at + v % 2 * 16));
        w[v] = input ? second_of(words) : first_of(words);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        __m256 number = _mm256_broadcast_ss(x + r * WIDE_ROW + input);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) total[r][v] = _mm256_fmadd_ps(number, w[v], total[r][v]);
      }
    }
  }
}

template <int R, int T>
INLINE void take_sums(const float* const (&at)[T], size_t row, bool add, __m256 (&total)[R][2 * T]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * T; v++)
      total[r][v] = add ? _mm256_loadu_ps(at[v / 2] + r * row + v % 2 * 8) : _mm256_setzero_ps();
}

template <int R, int T>
INLINE void put_sums(float* const (&at)[T], size_t row, const __m256 (&total)[R][2 * T]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * T; v++) _mm256_storeu_ps(at[v / 2] + r * row + v % 2 * 8, total[r][v]);
}

// Where keys of tile t have their scores.
struct ScoreRows {
  float* score;
  size_t row, step;
  INLINE float* of(int tile) const { return score + tile / 4 * step + tile % 4 * 16; }
};

template <int R, int T, bool ASK>
INLINE void score_beside(const float* x, const bf16* const* tile, const bf16* const* next, int first, int done, int lines,
                         const ScoreRows& to) {
  const bf16 *column[T], *after[T];
  float* at[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; t++) {
    column[t] = tile[first + t] + done * 32;
    after[t] = next[first + t] + done * 32;
    at[t] = to.of(first + t);
  }
  __m256 total[R][2 * T];
  take_sums<R, T>(const_cast<const float* const(&)[T]>(at), to.row, done > 0, total);
  add_lines<R, T, ASK>(x, column, after, 32, lines, total);
  put_sums<R, T>(at, to.row, total);
}

// Lines done .. done + lines - 1 of all tiles.
template <int R, bool ASK>
NOINLINE void score_rows(const float* x, const bf16* const* tile, const bf16* const* next, int tiles, int done, int lines,
                         const ScoreRows& to) {
  int t = 0;
  for (; t + BESIDE<R> <= tiles; t += BESIDE<R>) score_beside<R, BESIDE<R>, ASK>(x, tile, next, t, done, lines, to);
  for (; t < tiles; t++) score_beside<R, 1, ASK>(x, tile, next, t, done, lines, to);
}

// Sixteens of columns first .. first + T - 1 of all tiles, into sums.
template <int R, int T, bool ASK>
INLINE void values_beside(const float* x, const bf16* const* tile, const bf16* const* next, int tiles, const int* place,
                          size_t step, float* sum) {
  float* at[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; t++) at[t] = sum + t * 16;
  __m256 total[R][2 * T];
  take_sums<R, T>(const_cast<const float* const(&)[T]>(at), PANEL, true, total);
  for (int i = 0; i < tiles; i++, x += TILE_TOKENS) {
    const bf16 *column[T], *after[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) column[t] = tile[i] + place[t], after[t] = next[i] + place[t];
    add_lines<R, T, ASK>(x, column, after, step, TILE_TOKENS / 2, total);
  }
  put_sums<R, T>(at, PANEL, total);
}

// `sixteens` of columns, whose places in a tile are `place`.
template <int R, bool ASK>
NOINLINE void values_rows(const float* x, const bf16* const* tile, const bf16* const* next, int tiles, const int* place,
                          int sixteens, size_t step, float* sum) {
  int c = 0;
  for (; c + BESIDE<R> <= sixteens; c += BESIDE<R>)
    values_beside<R, BESIDE<R>, ASK>(x, tile, next, tiles, place + c, step, sum + c * 16);
  for (; c < sixteens; c++) values_beside<R, 1, ASK>(x, tile, next, tiles, place + c, step, sum + c * 16);
}

// By rows of a pass; the first pass asks for what is read next.
template <bool ASK>
constexpr decltype(&score_rows<1, ASK>) score_some[] = {nullptr,            score_rows<1, ASK>, score_rows<2, ASK>, score_rows<3, ASK>,
                                                        score_rows<4, ASK>, score_rows<5, ASK>, score_rows<6, ASK>};
template <bool ASK>
constexpr decltype(&values_rows<1, ASK>) values_some[] = {nullptr,             values_rows<1, ASK>, values_rows<2, ASK>, values_rows<3, ASK>,
                                                          values_rows<4, ASK>, values_rows<5, ASK>, values_rows<6, ASK>};

void score_tiles_avx2(const bf16* queries, size_t stride, int rows, const bf16* const* tile, const bf16* const* next, int tiles,
                      int lines, float* score, size_t row, size_t step) {
  constexpr int most = WIDE_ROW / 2;
  alignas(64) float x[PASS_ROWS * WIDE_ROW];
  for (int done = 0; done < lines; done += most) {
    int n = std::min(most, lines - done);
    in_passes(rows, [&](int r, int some) {
      for (int i = 0; i < some; i++)
        for (int k = 0; k < 2 * n; k += LANES) store(x + i * WIDE_ROW + k, load(queries + (r + i) * stride + 2 * done + k));
      auto* of = r ? score_some<false> : score_some<true>;
      of[some](x, tile, next, tiles, done, n, {score + r * row, row, step});
    });
  }
}

void add_values_avx2(const bf16* weights, size_t stride, int rows, const bf16* const* tile, const bf16* const* next, int tiles,
                     int first, int size, float* sum) {
  alignas(64) float x[PASS_ROWS * WIDE_ROW];
  int sixteens = 0, place[4];
  for (int c = first; c < size && sixteens < 4; c += 16) place[sixteens++] = int(value_column<bf16>(size, c));
  in_passes(rows, [&](int r, int some) {
    for (int i = 0; i < some; i++)
      for (int k = 0; k < tiles * TILE_TOKENS; k += LANES) store(x + i * WIDE_ROW + k, load(weights + (r + i) * stride + k));
    auto* of = r ? values_some<false> : values_some<true>;
    of[some](x, tile, next, tiles, place, sixteens, value_step<bf16>(size), sum + r * PANEL);
  });
}

}  // namespace
