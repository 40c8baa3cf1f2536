// Products with tiles of a cache by way of a panel: for instruction sets whose panel product is worth more than the copy.
#pragma once
#include "isa.h"
#include "tiles.h"

namespace {

template <class E>
constexpr int LINE = 64 / sizeof(E);  // elements
template <class E>
constexpr int LINES = BLOCK * 16 / LINE<E>;  // of a block's tile
constexpr int MOST = 4;                      // blocks of a panel

// Lines from the four columns, each `step` elements after the other, into a panel, line by line of its blocks; as many
// of `next` are asked for.
template <class E>
void copy_lines(const E* const* column, const E* const* next, size_t step, int lines, int first, E* panel) {
  for (int t = 0; t < 4; t++)
    for (int l = 0; l < lines; l++) {
      __builtin_prefetch(next[t] + l * step, 0, 2);
      memcpy(panel + (first + l) / LINES<E> * PANEL_BLOCK + t * TILE + (first + l) % LINES<E> * LINE<E>,
             column[t] + l * step, 64);
    }
}

template <class E>
void clear_lines(int first, int end, E* panel) {
  for (int t = 0; t < 4; t++)
    for (int l = first; l < end; l++)
      memset(panel + l / LINES<E> * PANEL_BLOCK + t * TILE + l % LINES<E> * LINE<E>, 0, 64);
}

template <class E, decltype(Loops<E>::gemm) GEMM>
void score_panel(const E* queries, size_t stride, int rows, const E* const* tile, const E* const* next, int lines,
                 float* score) {
  alignas(64) E panel[MOST * PANEL_BLOCK];
  for (int done = 0; done < lines; done += MOST * LINES<E>) {
    int n = lines - done < MOST * LINES<E> ? lines - done : MOST * LINES<E>, blocks = (n + LINES<E> - 1) / LINES<E>;
    const E *column[4], *after[4];
    for (int t = 0; t < 4; t++) column[t] = tile[t] + done * LINE<E>, after[t] = next[t] + done * LINE<E>;
    copy_lines(column, after, LINE<E>, n, 0, panel);
    clear_lines(n, blocks * LINES<E>, panel);
    GEMM(queries + done * LINE<E> / 16, stride, rows, panel, blocks, score, done > 0, {});
  }
}

// Where fewer than four tiles are left, the last stands in and is never read.
template <class E, decltype(Loops<E>::gemm) GEMM>
void score_by_panel(const E* queries, size_t stride, int rows, const E* const* tile, const E* const* next, int tiles,
                    int lines, float* score, size_t, size_t step) {
  for (int t = 0; t < tiles; t += 4, score += step) {
    const E *four[4], *after[4];
    for (int i = 0; i < 4; i++) {
      int at = t + i < tiles ? t + i : tiles - 1;
      four[i] = tile[at], after[i] = next[at];
    }
    score_panel<E, GEMM>(queries, stride, rows, four, after, lines, score);
  }
}

template <class E, decltype(Loops<E>::gemm) GEMM>
void values_by_panel(const E* weights, size_t stride, int rows, const E* const* tile, const E* const* next, int tiles,
                     int first, int size, float* sum) {
  constexpr int each = LINES<E> / 2, together = 2 * MOST;
  alignas(64) E panel[MOST * PANEL_BLOCK];
  for (int done = 0; done < tiles; done += together) {
    int n = tiles - done < together ? tiles - done : together;
    for (int i = done; i < done + n; i++) {
      const E *column[4], *after[4];
      for (int t = 0; t < 4; t++) {
        int at = value_column<E>(size, first + t * 16 < size ? first + t * 16 : first);
        column[t] = tile[i] + at, after[t] = next[i] + at;
      }
      copy_lines(column, after, value_step<E>(size), each, (i - done) * each, panel);
    }
    if (n % 2) clear_lines(n * each, (n + 1) * each, panel);
    GEMM(weights + done * 16, stride, rows, panel, (n + 1) / 2, sum, true, {});
  }
}

}  // namespace
