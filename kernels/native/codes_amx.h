// Scores of int8 codes of a cache (codes.h) with AMX INT8: sixteen tokens' codes are a tile of rows as they lie, and queries'
// whole numbers of 16 bits are two tiles, of their high bytes, which have the sign, and of their low ones. So are weights, without a
// sign; four tokens' values are words of a tile. Up to 8 rows' high and low bytes are one tile together.
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "codes_avx512.h"
#include "gemm_amx.h"

namespace {

constexpr int CODE_BLOCK = 64;                  // codes of a tile's row
constexpr int CODE_TILE = 16 * CODE_BLOCK / 4;  // words
constexpr int FEW_CODE_ROWS = 8;                // whose high and low bytes are one tile

INLINE bool are_few(const CodeQueries& q) { return q.rows <= FEW_CODE_ROWS; }

// Of 16 rows, block by block, a tile of high bytes and one of low ones: [words][rows]. Of few rows, a tile of both: low bytes,
// which have a sign then, follow the high ones of all.
INLINE int32_t* code_tiles(const CodeQueries& q, int size, int row) { return q.word + size_t(row / 16) * (size / CODE_BLOCK) * 2 * CODE_TILE; }

void to_codes_amx(const bf16* x, int size, int row, const CodeQueries& to) {
  const __m512 factor = _mm512_set1_ps(whole_factor(x, size, to.scale + row));
  const bool few = are_few(to);
  const int behind = few ? FEW_CODE_ROWS : CODE_TILE;
  const __m512i half = _mm512_set1_epi32(few ? 128 : 0);  // what a low byte's sign takes comes to the high one
  int32_t* at = code_tiles(to, size, row) + row % 16;
  for (int i = 0; i < size; i += 16, at += 4 * 16) {
    if (i && i % CODE_BLOCK == 0 && !few) at += CODE_TILE;
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(x + i)), 16);
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), factor));
    int32_t high[4], low[4];
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(whole, half), 8)));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(whole));
    for (int w = 0; w < 4; w++) at[w * 16] = high[w], at[behind + w * 16] = low[w];
  }
}

// Sums of a tile by token become scores by token.
INLINE void scale_sums(const CodeQueries& q, int first, const int32_t* high, const int32_t* low, const float* scale, bool add,
                       float* by_key) {
  const __m512 rows = _mm512_loadu_ps(q.scale + first);
  for (int t = 0; t < 16; t++, by_key += 16) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high + t * 16), 8), _mm512_load_si512(low + t * 16));
    const __m512 worth = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), rows), of = _mm512_set1_ps(scale[t]);
    _mm512_store_ps(by_key, add ? _mm512_fmadd_ps(worth, of, _mm512_load_ps(by_key)) : _mm512_mul_ps(worth, of));
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

// Four tiles' codes from `at` up to `end` times few rows: of each token the sums of high bytes, and of low ones.
INLINE void sum_few(const int32_t* word, const uint8_t* const (&code)[4], size_t stride, int at, int end, int32_t (*sum)[256]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (word += at / CODE_BLOCK * CODE_TILE; at < end; at += CODE_BLOCK, word += CODE_TILE) {
    _tile_loadd(7, word, 64);
    _tile_loadd(4, code[0] + at, stride);
    _tile_dpbssd(0, 4, 7);
    _tile_loadd(5, code[1] + at, stride);
    _tile_dpbssd(1, 5, 7);
    _tile_loadd(6, code[2] + at, stride);
    _tile_dpbssd(2, 6, 7);
    _tile_loadd(4, code[3] + at, stride);
    _tile_dpbssd(3, 4, 7);
  }
  _tile_stored(0, sum[0], 64);
  _tile_stored(1, sum[1], 64);
  _tile_stored(2, sum[2], 64);
  _tile_stored(3, sum[3], 64);
}

// Sums of a tile by token become those by row, of high and low bytes together.
INLINE void turn_few(const int32_t* sum, __m512i (&row)[FEW_CODE_ROWS]) {
  __m512i token[8], pair[8], four[8];  // tokens t and t + 8, each of eight rows
  for (int t = 0; t < 8; t++, sum += 16) {
    auto both = [&](const int32_t* at) { return _mm512_inserti64x4(_mm512_castsi256_si512(load_raw<__m256i>(at)), load_raw<__m256i>(at + 8 * 16), 1); };
    token[t] = _mm512_add_epi32(_mm512_slli_epi32(both(sum), 8), both(sum + FEW_CODE_ROWS));
  }
  for (int t = 0; t < 8; t += 2)
    pair[t] = _mm512_unpacklo_epi32(token[t], token[t + 1]), pair[t + 1] = _mm512_unpackhi_epi32(token[t], token[t + 1]);
  for (int t = 0; t < 8; t += 4)
    for (int i = 0; i < 2; i++) {
      four[t + 2 * i] = _mm512_unpacklo_epi64(pair[t + i], pair[t + i + 2]);
      four[t + 2 * i + 1] = _mm512_unpackhi_epi64(pair[t + i], pair[t + i + 2]);
    }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int r = 0; r < 4; r++) {
    row[r] = _mm512_permutex2var_epi64(four[r], low, four[r + 4]);
    row[r + 4] = _mm512_permutex2var_epi64(four[r], high, four[r + 4]);
  }
}

NOINLINE void score_few(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const CodeScales& scale,
                        float* score, size_t row, size_t step) {
  alignas(64) int32_t sum[4][256];
  for (int t = 0; t < tiles; t += 4, score += step) {
    const int n = std::min(tiles - t, 4);
    const uint8_t* const four[4] = {code[t], code[t + std::min(1, n - 1)], code[t + std::min(2, n - 1)], code[t + n - 1]};
    auto add_part = [&](int at, int end, const float* of, bool add) {
      sum_few(q.word, four, stride, at, end, sum);
      for (int i = 0; i < n; i++) {
        __m512i by_row[FEW_CODE_ROWS];
        turn_few(sum[i], by_row);
        const __m512 scales = _mm512_loadu_ps(of + (t + i) * TILE_TOKENS);
        float* to = score + i * TILE_TOKENS;
        for (int r = 0; r < q.rows; r++, to += row) {
          __m512 worth = _mm512_mul_ps(_mm512_cvtepi32_ps(by_row[r]), _mm512_set1_ps(q.scale[r]));
          _mm512_storeu_ps(to, add ? _mm512_fmadd_ps(worth, scales, _mm512_loadu_ps(to)) : _mm512_mul_ps(worth, scales));
        }
      }
    };
    add_part(0, scale.count, scale.first, false);
    if (scale.count < size) add_part(scale.count, size, scale.others, true);
  }
}

void score_codes_amx(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const CodeScales& scale,
                     float* score, size_t row, size_t step) {
  if (are_few(q)) return score_few(q, code, tiles, stride, size, scale, score, row, step);
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

// The same of few rows, whose high and low bytes take turns in a tile.
INLINE void sum_few_columns(const uint8_t* high, size_t step, const __m512i* value, int blocks, int32_t (*sum)[256]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int b = 0; b < blocks; b++, high += CODE_BLOCK, value += CODE_BLOCK) {
    _tile_loadd(4, high, step / 2);
    _tile_loadd(5, value, 4 * 64);
    _tile_dpbusd(0, 4, 5);
    _tile_loadd(6, value + 1, 4 * 64);
    _tile_dpbusd(1, 4, 6);
    _tile_loadd(7, value + 2, 4 * 64);
    _tile_dpbusd(2, 4, 7);
    _tile_loadd(5, value + 3, 4 * 64);
    _tile_dpbusd(3, 4, 5);
  }
  _tile_stored(0, sum[0], 64);
  _tile_stored(1, sum[1], 64);
  _tile_stored(2, sum[2], 64);
  _tile_stored(3, sum[3], 64);
}

// A row's sums of 64 columns are added: of high bytes, `step` behind them of low ones, and `next` behind of sixteen more columns.
INLINE void add_row(const int32_t* high, size_t step, size_t next, float worth, float* sum) {
  __m512i total[4];
  for (int v = 0; v < 4; v++, high += next)
    total[v] = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(high + step));
  add_columns(total, worth, sum);
}

void add_codes_amx(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                   const float* scale, float* sum, size_t panel_step) {
  alignas(64) int32_t sums[4][2][256], few[4][256];
  Window<NEAR_ROWS> w;
  memset(w.high, 0, sizeof w.high);  // what there is none of weighs nothing
  const int blocks = (tiles * TILE_TOKENS + CODE_BLOCK - 1) / CODE_BLOCK;
  for (int begin = 0; begin < rows; begin += NEAR_ROWS, weights += NEAR_ROWS * stride, sum += NEAR_ROWS * PANEL) {
    const int some = std::min(rows - begin, NEAR_ROWS);
    w.take_weights(weights, stride, some, scale, tiles);
    for (int first = 0; first < size; first += PANEL) {
      w.take_values(code, tiles, code_stride, first, size);
      float* to = sum + first / PANEL * panel_step;
      for (int row = 0; row < some; row += 16) {
        const int n = std::min(some - row, 16);
        if (n <= FEW_CODE_ROWS) {
          sum_few_columns(w.high[row], sizeof w.high[row], w.value, blocks, few);
          for (int r = 0; r < n; r++) add_row(few[0] + 2 * r * 16, 16, 256, w.worth[row + r], to + (row + r) * PANEL);
          continue;
        }
        sum_columns(w.high[row], sizeof w.high[row], w.value, blocks, sums);
        for (int r = 0; r < n; r++) add_row(sums[0][0] + r * 16, 256, 512, w.worth[row + r], to + (row + r) * PANEL);
      }
    }
  }
}

}  // namespace
