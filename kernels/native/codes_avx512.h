// What products with codes of a cache (codes.h) have in common with AVX-512: a window's weights as whole numbers of 16 bits, whose
// bytes are multiplied apart, and its values by fours of tokens. Sums are exact, so they are the same however they are made.
#pragma once
#include <immintrin.h>
#include <math.h>

#include <algorithm>

#include "attention_loops.h"
#include "codes.h"

namespace {

constexpr int NEAR_ROWS = 32;  // whose queries or weights stay in the nearest cache
constexpr int WINDOW = 8;      // tiles whose weights share a scale
constexpr float MOST_WEIGHT = 65535.0f;

// A row's weights, times the scales of their values, as whole numbers' high and low bytes, in whole lines; returns what 1 is worth.
INLINE float take_weights(const bf16* weight, const float* scale, int tiles, uint8_t* high, uint8_t* low) {
  __m512 w[WINDOW], most = _mm512_setzero_ps();
  __mmask16 finite = 0xffff;
  for (int t = 0; t < tiles; t++) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(weight + t * TILE_TOKENS)), 16);
    w[t] = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_loadu_ps(scale + t * TILE_TOKENS));
    finite &= _mm512_cmp_ps_mask(w[t], _mm512_set1_ps(3.402823466e38f), _CMP_LE_OQ);
    most = _mm512_max_ps(most, w[t]);
  }
  const float top = _mm512_reduce_max_ps(most), worth = top / MOST_WEIGHT;
  const bool some = finite == 0xffff && worth > 0;
  const __m512 factor = _mm512_set1_ps(some ? MOST_WEIGHT / top : 0.0f);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), byte = _mm512_set1_epi16(0xff);
  for (int t = 0; t < tiles; t += 4, high += 64, low += 64) {
    __m512i whole[4], words[2];
    for (int i = 0; i < 4; i++)
      whole[i] = some && t + i < tiles ? _mm512_cvtps_epi32(_mm512_mul_ps(w[t + i], factor)) : _mm512_setzero_si512();
    for (int i = 0; i < 2; i++) words[i] = _mm512_packus_epi32(whole[2 * i], whole[2 * i + 1]);
    __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(words[0], 8), _mm512_srli_epi16(words[1], 8));
    __m512i lower = _mm512_packus_epi16(_mm512_and_si512(words[0], byte), _mm512_and_si512(words[1], byte));
    store_raw(high, _mm512_permutexvar_epi32(order, upper));
    store_raw(low, _mm512_permutexvar_epi32(order, lower));
  }
  return finite == 0xffff ? worth : NAN;
}

// 64 columns of sixteen tokens, or fewer: of each four tokens four vectors, whose words are four tokens of a column; column 16 l
// + 4 v + w is word w of lane l of vector v.
INLINE void take_values(const uint8_t* code, size_t stride, __mmask64 there, __m512i* value) {
  for (int t = 0; t < TILE_TOKENS; t += 4, code += 4 * stride, value += 4) {
    __m512i a = _mm512_maskz_loadu_epi8(there, code), b = _mm512_maskz_loadu_epi8(there, code + stride);
    __m512i c = _mm512_maskz_loadu_epi8(there, code + 2 * stride), d = _mm512_maskz_loadu_epi8(there, code + 3 * stride);
    __m512i low[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d)};
    __m512i high[2] = {_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d)};
    value[0] = _mm512_unpacklo_epi16(low[0], low[1]), value[1] = _mm512_unpackhi_epi16(low[0], low[1]);
    value[2] = _mm512_unpacklo_epi16(high[0], high[1]), value[3] = _mm512_unpackhi_epi16(high[0], high[1]);
  }
}

// Sums of 64 columns, as take_values has them, become what they are worth and are added.
INLINE void add_columns(const __m512i* total, float worth, float* sum) {
  __m512i a = _mm512_shuffle_i32x4(total[0], total[1], 0x44), b = _mm512_shuffle_i32x4(total[0], total[1], 0xee);
  __m512i c = _mm512_shuffle_i32x4(total[2], total[3], 0x44), d = _mm512_shuffle_i32x4(total[2], total[3], 0xee);
  __m512i columns[4] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd), _mm512_shuffle_i32x4(b, d, 0x88),
                        _mm512_shuffle_i32x4(b, d, 0xdd)};
  for (int v = 0; v < 4; v++, sum += 16)
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(columns[v]), _mm512_set1_ps(worth), _mm512_loadu_ps(sum)));
}

// One window's weights of so many rows, and 64 columns of its values.
template <int ROWS>
struct Window {
  alignas(64) __m512i value[WINDOW * TILE_TOKENS];
  alignas(64) uint8_t high[ROWS][2 * WINDOW * TILE_TOKENS];  // and behind them the low bytes
  float worth[ROWS];

  void take_weights(const bf16* weights, size_t stride, int rows, const float* scale, int tiles) {
    for (int r = 0; r < rows; r++) worth[r] = ::take_weights(weights + r * stride, scale, tiles, high[r], high[r] + WINDOW * TILE_TOKENS);
  }

  void take_values(const uint8_t* const* code, int tiles, size_t stride, int first, int size) {
    const __mmask64 there = size - first < PANEL ? (1ull << (size - first)) - 1 : ~0ull;
    for (int t = 0; t < tiles; t++) ::take_values(code[t] + first, stride, there, value + t * TILE_TOKENS);
  }
};

}  // namespace
