// Scores of int8 codes of a cache (codes.h) with AMX INT8: sixteen tokens' codes are a tile of rows as they lie, and queries'
// whole numbers of 16 bits are two tiles, of their high bytes, which have the sign, and of their low ones. So are weights, without a
// sign; four tokens' values are words of a tile.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "codes_avx512.h"
#include "gemm_amx.h"

void add_codes_vnni(bf16*, size_t, int, const uint8_t* const*, int, size_t, int, const float*, float*, size_t);  // codes_vnni.cpp

namespace {

constexpr int CODE_BLOCK = 64;                  // codes of a tile's row
constexpr int CODE_TILE = 16 * CODE_BLOCK / 4;  // words
constexpr int FEW_CODE_ROWS = 8;                // of weights: VPDPBUSD, which has the same sums, takes two thirds of the time

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

// Sums of a tile by token become scores by token.
INLINE void scale_sums(const CodeQueries& q, int first, const int32_t* high, const int32_t* low, const float* scale, bool add,
                       float* by_key) {
  const __m512 rows = _mm512_loadu_ps(q.scale + first);
  for (int t = 0; t < 16; t++, by_key += 16) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high + t * 16), 8), _mm512_load_si512(low + t * 16));
    __m512 score = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), rows), _mm512_set1_ps(scale[t]));
    _mm512_store_ps(by_key, add ? _mm512_add_ps(_mm512_load_ps(by_key), score) : score);
  }
}

// Two tiles' codes from `at` up to `end` times sixteen rows: of each the sums of high and of low bytes.
INLINE void sum_tiles(const int32_t* word, const uint8_t* a, const uint8_t* b, size_t stride, int at, int end, int32_t (*sum)[256]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (word += at / CODE_BLOCK * 2 * CODE_TILE; at < end; at += CODE_BLOCK, word += 2 * CODE_TILE) {
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
}

void score_codes_amx(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const CodeScales& scale,
                     float* score, size_t row, size_t step) {
  alignas(64) int32_t sum[4][256];
  alignas(64) float by_key[2][256];
  for (int t = 0; t < tiles; t += 2)
    for (int first = 0; first < q.rows; first += 16) {
      const int n = std::min(tiles - t, 2);
      const int32_t* word = code_tiles(q, size, first);
      auto add_part = [&](int at, int end, const float* of, bool add) {
        sum_tiles(word, code[t], code[t + n - 1], stride, at, end, sum);
        for (int i = 0; i < n; i++) scale_sums(q, first, sum[2 * i], sum[2 * i + 1], of + (t + i) * TILE_TOKENS, add, by_key[i]);
      };
      add_part(0, scale.count, scale.first, false);
      if (scale.count < size) add_part(scale.count, size, scale.others, true);
      for (int i = 0; i < n; i++)
        turn_scores(by_key[i], std::min(q.rows - first, 16), score + (t + i) / 4 * step + (t + i) % 4 * TILE_TOKENS + first * row, row);
    }
}

// Sixteen rows of weights times 64 columns: of each sixteen columns the sums of high bytes, and of low ones.
INLINE void sum_columns(const uint8_t* high, size_t step, const __m512i* value, int blocks, int32_t (*sum)[2][256]) {
  for (int v = 0; v < 4; v += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int b = 0; b < blocks; b++) {
      const uint8_t* weight = high + b * CODE_BLOCK;
      const __m512i* columns = value + b * CODE_BLOCK + v;
      _tile_loadd(4, weight, step);
      _tile_loadd(6, columns, 4 * 64);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(5, weight + step / 2, step);
      _tile_dpbusd(1, 5, 6);
      _tile_loadd(7, columns + 1, 4 * 64);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sum[v][0], 64);
    _tile_stored(1, sum[v][1], 64);
    _tile_stored(2, sum[v + 1][0], 64);
    _tile_stored(3, sum[v + 1][1], 64);
  }
}

void add_codes_amx(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                   const float* scale, float* sum, size_t panel_step) {
  if (rows <= FEW_CODE_ROWS) return add_codes_vnni(weights, stride, rows, code, tiles, code_stride, size, scale, sum, panel_step);
  alignas(64) int32_t sums[4][2][256];
  Window<NEAR_ROWS> w;
  memset(w.high, 0, sizeof w.high);  // what there is none of weighs nothing
  const int blocks = (tiles * TILE_TOKENS + CODE_BLOCK - 1) / CODE_BLOCK;
  for (int begin = 0; begin < rows; begin += NEAR_ROWS, weights += NEAR_ROWS * stride, sum += NEAR_ROWS * PANEL) {
    const int some = std::min(rows - begin, NEAR_ROWS);
    w.take_weights(weights, stride, some, scale, tiles);
    for (int first = 0; first < size; first += PANEL) {
      w.take_values(code, tiles, code_stride, first, size);
      for (int row = 0; row < some; row += 16) {
        sum_columns(w.high[row], sizeof w.high[row], w.value, blocks, sums);
        float* to = sum + first / PANEL * panel_step + row * PANEL;
        for (int r = 0; r < std::min(some - row, 16); r++) {
          __m512i total[4];
          for (int v = 0; v < 4; v++)
            total[v] = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(sums[v][0] + r * 16), 8), _mm512_load_si512(sums[v][1] + r * 16));
          add_columns(total, w.worth[row + r], to + r * PANEL);
        }
      }
    }
  }
}

}  // namespace
