// Scores of int8 codes of a cache (codes.h) with AMX INT8: sixteen tokens' codes are a tile of rows as they lie, and queries'
// whole numbers of 16 bits are two tiles, of their high bytes, which have the sign, and of their low ones. Values become panels
// of bf16, which have all that a code has, and weights are rounded to bf16 with their scales.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "codes.h"
#include "gemm_amx.h"

void panel_of_codes(const uint8_t* const* code, int tiles, size_t stride, int first, bf16* panel);  // codes_vbmi.cpp

namespace {

constexpr int CODE_BLOCK = 64;                 // codes of a tile's row
constexpr int CODE_TILE = 16 * CODE_BLOCK / 4;  // words
constexpr int MOST_CODE_TILES = 8;              // of values that become a panel

// Of 16 rows, block by block, a tile of high bytes and one of low ones: [words][rows].
INLINE int32_t* code_tiles(const CodeQueries& q, int size, int row) { return q.word + size_t(row / 16) * (size / CODE_BLOCK) * 2 * CODE_TILE; }

void to_codes_amx(const bf16* x, int size, int row, const CodeQueries& to) {
  const __m512 factor = _mm512_set1_ps(whole_factor(x, size, to.scale + row));
  int32_t* at = code_tiles(to, size, row) + row % 16;
  for (int i = 0; i < size; i += 16, at += 4 * 16) {
    if (i && i % CODE_BLOCK == 0) at += CODE_TILE;
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(x + i)), 16);
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), factor));
    int32_t high[4], low[4];
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 8)));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(whole));
    for (int w = 0; w < 4; w++) at[w * 16] = high[w], at[CODE_TILE + w * 16] = low[w];
  }
}

// Sums by token become scores by row.
INLINE void store_scores(const CodeQueries& q, int first, const int32_t* high, const int32_t* low, const float* scale, float* score,
                         size_t row) {
  alignas(64) float by_key[256];
  const __m512 rows = _mm512_loadu_ps(q.scale + first);
  for (int t = 0; t < 16; t++) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high + t * 16), 8), _mm512_load_si512(low + t * 16));
    _mm512_store_ps(by_key + t * 16, _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), rows), _mm512_set1_ps(scale[t])));
  }
  turn_scores(by_key, std::min(q.rows - first, 16), score + first * row, row);
}

void score_codes_amx(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const float* scale,
                     float* score, size_t row, size_t step) {
  alignas(64) int32_t sum[4][256];
  for (int first = 0; first < q.rows; first += 16)
    for (int t = 0; t < tiles; t += 2) {
      const uint8_t *a = code[t], *b = code[std::min(t + 1, tiles - 1)];
      const int32_t* word = code_tiles(q, size, first);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int at = 0; at < size; at += CODE_BLOCK, word += 2 * CODE_TILE) {
        _tile_loadd(6, word, 64);
        _tile_loadd(4, a + at, stride);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, word + CODE_TILE, 64);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(5, b + at, stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
      _tile_stored(0, sum[0], 64);
      _tile_stored(1, sum[1], 64);
      _tile_stored(2, sum[2], 64);
      _tile_stored(3, sum[3], 64);
      for (int i = 0; i < 2 && t + i < tiles; i++)
        store_scores(q, first, sum[2 * i], sum[2 * i + 1], scale + (t + i) * TILE_TOKENS,
                     score + (t + i) / 4 * step + (t + i) % 4 * TILE_TOKENS, row);
    }
}

void add_codes_amx(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                   const float* scale, float* sum, size_t panel_step) {
  alignas(64) bf16 panel[MOST_CODE_TILES / 2 * PANEL_BLOCK];
  for (int r = 0; r < rows; r++) scale_each(weights + r * stride, scale, tiles * TILE_TOKENS);
  for (int done = 0; done < tiles; done += MOST_CODE_TILES) {
    int n = std::min(tiles - done, MOST_CODE_TILES);
    for (int first = 0; first < size; first += PANEL) {
      panel_of_codes(code + done, n, code_stride, first, panel);
      gemm_tiles(weights + done * TILE_TOKENS, stride, rows, panel, (n + 1) / 2, sum + first / PANEL * panel_step, true, {});
    }
  }
}

}  // namespace
