// Panel products with AMX tiles (TDPBF16PS). Every row count runs the same instructions over the inputs in the
// same order, so a row's sum does not depend on the others. Its bits differ from VDPBF16PS: the two never mix.
//
// All tiles are always 16 rows of 64 bytes: to configure them takes some 200 ns, so it is done once per thread and
// op, and rows are read and written in sixteens (ROW_GROUP). Up to 16 rows the product is bound by memory anyway.
#pragma once
#include <immintrin.h>

#include "isa.h"
#include "vec.h"

namespace {

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void enter_tiles() {
  static const TileConfig config;
  _tile_loadconfig(&config);
}

void leave_tiles() { _tile_release(); }

constexpr int SUM_BYTES = PANEL * 4;  // from one row of sums to the next

// 16 rows: all four tiles of the panel at once, weights streamed once. The processor's own prefetcher keeps up (93 %
// of a plain read; software prefetch cost a third of the speed from cache and won nothing).
void rows_16(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add) {
  if (add) {
    _tile_loadd(0, sum, SUM_BYTES);
    _tile_loadd(1, sum + 16, SUM_BYTES);
    _tile_loadd(2, sum + 32, SUM_BYTES);
    _tile_loadd(3, sum + 48, SUM_BYTES);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int b = 0; b < blocks; b++, a += BLOCK, panel += PANEL_BLOCK) {
    _tile_loadd(4, a, stride * 2);
    _tile_loadd(5, panel, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, panel + TILE, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, panel + 2 * TILE, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, panel + 3 * TILE, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sum, SUM_BYTES);
  _tile_stored(1, sum + 16, SUM_BYTES);
  _tile_stored(2, sum + 32, SUM_BYTES);
  _tile_stored(3, sum + 48, SUM_BYTES);
}

// 32 rows: two tiles of rows by two of columns, two passes over the columns. `next` is brought near meanwhile,
// `lines` cache lines at every step.
void rows_32(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add, const char* next,
             int lines) {
  for (int half = 0; half < 2; half++, panel += 2 * TILE, sum += 32) {
    float* below = sum + 16 * PANEL;
    if (add) {
      _tile_loadd(0, sum, SUM_BYTES);
      _tile_loadd(1, sum + 16, SUM_BYTES);
      _tile_loadd(2, below, SUM_BYTES);
      _tile_loadd(3, below + 16, SUM_BYTES);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const bf16 *x = a, *w = panel;
    for (int b = 0; b < blocks; b++, x += BLOCK, w += PANEL_BLOCK) {
      _tile_loadd(4, x, stride * 2);
      _tile_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x + 16 * stride, stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      for (int line = 0; line < lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
    _tile_stored(0, sum, SUM_BYTES);
    _tile_stored(1, sum + 16, SUM_BYTES);
    _tile_stored(2, below, SUM_BYTES);
    _tile_stored(3, below + 16, SUM_BYTES);
  }
}

void gemm_tiles(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add,
                Next next) {
  // The first 32 rows wait for this panel; the others find it near and have time to ask for what comes next.
  int pairs = (rows + 15) / 32, steps = (pairs - 1) * 2 * blocks;
  int lines = steps > 0 ? (next.lines + steps - 1) / steps : 0;
  for (int pair = 0; rows > 16; pair++, rows -= 32, a += 32 * stride, sum += 32 * PANEL) {
    rows_32(a, stride, panel, blocks, sum, add, next.data, pair ? lines : 0);
    if (pair) next.data += (size_t)lines * 64 * blocks * 2;
  }
  if (rows > 0) rows_16(a, stride, panel, blocks, sum, add);
}

// Scores of up to 16 query rows without packing the keys: 16 key rows are one tile as they lie in the cache. The
// products and their order are those of gemm_tiles with the operands exchanged, so the bits are the same.
// What comes out has a row per key; four queries at a time become rows.
void turn_scores(const float* by_key, int rows, float* scores, size_t row) {
  for (int q = 0; q < rows; q += 4) {
    __m512 line[4];  // line j, lane l: queries q .. q + 3 of key 4 l + j
    for (int j = 0; j < 4; j++) {
      const float* at = by_key + j * 16 + q;
      line[j] = _mm512_castps128_ps512(_mm_load_ps(at));
      line[j] = _mm512_insertf32x4(line[j], _mm_load_ps(at + 4 * 16), 1);
      line[j] = _mm512_insertf32x4(line[j], _mm_load_ps(at + 8 * 16), 2);
      line[j] = _mm512_insertf32x4(line[j], _mm_load_ps(at + 12 * 16), 3);
    }
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(line[0], line[1]));
    __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(line[2], line[3]));
    __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(line[0], line[1]));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(line[2], line[3]));
    float* to = scores + q * row;
    _mm512_storeu_pd(to, _mm512_unpacklo_pd(a, b));
    _mm512_storeu_pd(to + row, _mm512_unpackhi_pd(a, b));
    _mm512_storeu_pd(to + 2 * row, _mm512_unpacklo_pd(c, d));
    _mm512_storeu_pd(to + 3 * row, _mm512_unpackhi_pd(c, d));
  }
}

void score_tiles(const bf16* queries, const bf16* const* keys, size_t stride, int blocks, int rows, float* scores) {
  alignas(64) float by_key[4][256];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int b = 0; b < blocks; b++) {
    _tile_loadd(6, queries + b * PANEL_BLOCK, 64);
    _tile_loadd(4, keys[0] + b * BLOCK, stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys[1] + b * BLOCK, stride * 2);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, keys[2] + b * BLOCK, stride * 2);
    _tile_dpbf16ps(2, 7, 6);
    _tile_loadd(4, keys[3] + b * BLOCK, stride * 2);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, by_key[0], 64);
  _tile_stored(1, by_key[1], 64);
  _tile_stored(2, by_key[2], 64);
  _tile_stored(3, by_key[3], 64);
  for (int t = 0; t < 4; t++) turn_scores(by_key[t], rows, scores + t * 16, PANEL);
}

}  // namespace
