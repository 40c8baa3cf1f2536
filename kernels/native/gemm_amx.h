// Panel products with AMX tiles (TDPBF16PS). Every row count runs the same instructions over the inputs in the
// same order, so a row's sum does not depend on the others. Its bits differ from VDPBF16PS: the two never mix.
#pragma once
#include <immintrin.h>

#include "isa.h"

namespace {

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 sums, 4 and 5 activations, 6 and 7 weights. `low` rows in the second half of a 32-row block.
inline void configure(int high, int low) {
  TileConfig config;
  const int rows[8] = {high, high, low ? low : high, low ? low : high, high, low ? low : 16, 16, 16};
  for (int i = 0; i < 8; i++) config.rows[i] = rows[i], config.row_bytes[i] = 64;
  _tile_loadconfig(&config);
}

// Up to 16 rows: all four tiles of the panel at once, weights streamed once. The processor's own prefetcher keeps
// up (93 % of a plain read; software prefetch cost a third of the speed from cache and won nothing).
void rows_16(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add) {
  constexpr int bytes = PANEL * 4;
  if (add) {
    _tile_loadd(0, sum, bytes);
    _tile_loadd(1, sum + 16, bytes);
    _tile_loadd(2, sum + 32, bytes);
    _tile_loadd(3, sum + 48, bytes);
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
  _tile_stored(0, sum, bytes);
  _tile_stored(1, sum + 16, bytes);
  _tile_stored(2, sum + 32, bytes);
  _tile_stored(3, sum + 48, bytes);
}

// 17 to 32 rows: two tiles of rows by two of columns, two passes over the columns. `next` is brought near
// meanwhile, `lines` cache lines at every step.
void rows_32(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add, const char* next,
             int lines) {
  constexpr int bytes = PANEL * 4;
  for (int half = 0; half < 2; half++, panel += 2 * TILE, sum += 32) {
    float* below = sum + 16 * PANEL;
    if (add) {
      _tile_loadd(0, sum, bytes);
      _tile_loadd(1, sum + 16, bytes);
      _tile_loadd(2, below, bytes);
      _tile_loadd(3, below + 16, bytes);
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
    _tile_stored(0, sum, bytes);
    _tile_stored(1, sum + 16, bytes);
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + 16, bytes);
  }
}

void gemm_tiles(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add) {
  if (rows >= 32) configure(16, 16);
  // The first 32 rows wait for this panel; the others find it near and have time to fetch the one after it.
  const char* next = (const char*)(panel + (size_t)blocks * PANEL_BLOCK);
  int lines = rows >= 64 ? 32 / (rows / 32 - 1) : 0;
  for (bool first = true; rows >= 32; rows -= 32, a += 32 * stride, sum += 32 * PANEL, first = false) {
    rows_32(a, stride, panel, blocks, sum, add, next, first ? 0 : lines);
    if (!first) next += (size_t)lines * 64 * blocks * 2;
  }
  if (!rows) return;
  configure(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 0);
  if (rows > 16)
    rows_32(a, stride, panel, blocks, sum, add, next, 0);
  else
    rows_16(a, stride, panel, blocks, sum, add);
}

void release() { _tile_release(); }

}  // namespace
