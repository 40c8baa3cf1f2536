// Products with int8 weights with AMX (TDPBUSD). A row is two rows of bytes, and weights are tiles as they lie.
#pragma once
#include "gemm_amx.h"
#include "int8_rows.h"

namespace {

constexpr int BYTES_AHEAD = 2 * INT8_BLOCK;  // what is asked for early

// Asks for a quarter of a block that follows so far behind `at`; past `end`, for what lies at `after`.
struct BytesAhead {
  const char *end, *after;
  INLINE void ask(const int8_t* at) const {
    const char* early = reinterpret_cast<const char*>(at) + BYTES_AHEAD;
    if (early >= end) early = after + (early - end);
    for (int line = 0; line < INT8_TILE; line += 64) _mm_prefetch(early + line, _MM_HINT_T1);
  }
};

// 16 rows of bytes, all four tiles of the panel at once, weights streamed once.
INLINE void bytes_16(const uint8_t* a, size_t stride, const Int8Panel& panel, int32_t* whole, const BytesAhead& ahead) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int8_t* w = panel.data;
  for (int b = 0; b < panel.blocks; b++, a += INT8_INPUTS, w += INT8_BLOCK) {
    _tile_loadd(4, a, stride);
    _tile_loadd(5, w, 64);
    _tile_dpbusd(0, 4, 5);
    ahead.ask(w);
    _tile_loadd(6, w + INT8_TILE, 64);
    _tile_dpbusd(1, 4, 6);
    ahead.ask(w + INT8_TILE);
    _tile_loadd(7, w + 2 * INT8_TILE, 64);
    _tile_dpbusd(2, 4, 7);
    ahead.ask(w + 2 * INT8_TILE);
    _tile_loadd(5, w + 3 * INT8_TILE, 64);
    _tile_dpbusd(3, 4, 5);
    ahead.ask(w + 3 * INT8_TILE);
  }
  _tile_stored(0, whole, SUM_BYTES);
  _tile_stored(1, whole + 16, SUM_BYTES);
  _tile_stored(2, whole + 32, SUM_BYTES);
  _tile_stored(3, whole + 48, SUM_BYTES);
}

// 32 rows of bytes, as rows_32 does it. FIRST: nothing of the panel is near yet.
template <bool FIRST>
INLINE void bytes_32(const uint8_t* a, size_t stride, const Int8Panel& panel, int32_t* whole, const char* next, int lines,
                     const BytesAhead& ahead) {
  for (int half = 0; half < 2; half++, whole += 32) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint8_t* x = a;
    const int8_t* w = panel.data + half * 2 * INT8_TILE;
    for (int b = 0; b < panel.blocks; b++, x += INT8_INPUTS, w += INT8_BLOCK) {
      _tile_loadd(4, x, stride);
      _tile_loadd(6, w, 64);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(7, w + INT8_TILE, 64);
      _tile_dpbusd(1, 4, 7);
      _tile_loadd(5, x + 16 * stride, stride);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
      if (FIRST && !half)
        for (int t = 0; t < 4; t++) ahead.ask(w + t * INT8_TILE);
      if (!FIRST)
        for (int line = 0; line < lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
    _tile_stored(0, whole, SUM_BYTES);
    _tile_stored(1, whole + 16, SUM_BYTES);
    _tile_stored(2, whole + 16 * PANEL, SUM_BYTES);
    _tile_stored(3, whole + 16 * PANEL + 16, SUM_BYTES);
  }
}

void gemm_bytes_tiles(const ByteRows& a, int rows, const Int8Panel& panel, float* sum, Next next) {
  alignas(64) int32_t whole[32 * PANEL];
  int steps = ((rows + 15) / 16 - 1) * 2 * panel.blocks;  // of all sixteens but the first, which wait for this panel
  int lines = steps > 0 ? (next.lines + steps - 1) / steps : 0;
  BytesAhead ahead{reinterpret_cast<const char*>(panel.data) + size_t(panel.blocks) * INT8_BLOCK, next.data};
  for (int r = 0; r < rows; r += 16) {
    ByteRows some = a.from(r);
    int n = rows - r < 16 ? rows - r : 16;
    if (n <= 8) {
      bytes_16(some.data, a.stride, panel, whole, ahead);
    } else if (!r) {
      bytes_32<true>(some.data, a.stride, panel, whole, next.data, 0, ahead);
    } else {
      bytes_32<false>(some.data, a.stride, panel, whole, next.data, lines, ahead);
      next.data += size_t(lines) * 64 * panel.blocks * 2;
    }
    bytes_to_sums(whole, n, panel, some.scale, sum + r * PANEL);
  }
}

}  // namespace
