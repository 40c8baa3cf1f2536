// Rows as whole numbers of 16 bits and back (int8.h), with AVX-512. A number of 16 bits is finer than bf16 for all but the
// smallest of a row, and sums of whole numbers are exact: their bits depend on no order, batch or instruction.
#pragma once
#include <math.h>

#include "vec.h"

namespace {

constexpr int HALF_RANGE = 32768, MOST_NUMBER = 32767;
constexpr float LEAST_ROW = 1e-30f;  // the largest number of a row below which it counts as zeros: 1 / x must be a float

// The largest magnitude of a row as the bits of a bf16, which order as whole numbers do.
INLINE unsigned most_bits(const bf16* x, int size) {
  __m512i most = _mm512_setzero_si512();
  int i = 0;
  const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
  for (; i + 32 <= size; i += 32) most = _mm512_max_epu16(most, _mm512_andnot_si512(sign, _mm512_loadu_si512(x + i)));
  if (i < size) {
    __mmask32 some = __mmask32((1ull << (size - i)) - 1);
    most = _mm512_max_epu16(most, _mm512_andnot_si512(sign, _mm512_maskz_loadu_epi16(some, x + i)));
  }
  __m512i low = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
  return _mm512_reduce_max_epu32(_mm512_max_epu32(low, _mm512_srli_epi32(most, 16)));
}

inline void row_to_bytes(const bf16* x, int size, const ByteRows& to, int row) {
  uint8_t *high = to.data + 2 * row * to.stride, *low = high + to.stride;
  unsigned bits = most_bits(x, size) << 16;
  float most;
  memcpy(&most, &bits, 4);
  bool finite = bits < 0x7f800000u;
  to.scale[row] = finite ? most / MOST_NUMBER : NAN;
  float inverse = finite && most > LEAST_ROW ? MOST_NUMBER / most : 0.0f;
  for (int i = 0; i < int(to.stride); i += 16) {
    int left = size - i;
    __mmask16 some = left >= 16 ? 0xffff : left > 0 ? __mmask16((1u << left) - 1) : 0;
    __m256i narrow = finite ? _mm256_maskz_loadu_epi16(some, x + i) : _mm256_setzero_si256();
    __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(wide, _mm512_set1_ps(inverse)));
    number = _mm512_add_epi32(number, _mm512_set1_epi32(HALF_RANGE));
    _mm_storeu_si128((__m128i*)(low + i), _mm512_cvtepi32_epi8(number));
    _mm_storeu_si128((__m128i*)(high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 8)));
  }
}

// Sums of a row's high bytes and of its low ones, 64 each, as floats: (high - 128 * weights) * 256 + low, and the scales.
INLINE void bytes_to_sums(const int32_t* whole, int rows, const Int8Panel& panel, const float* scale, float* sum) {
  for (int t = 0; t < 4; t++) {
    __m512i correction = _mm512_loadu_si512(panel.correction + t * 16);
    __m512 column = _mm512_loadu_ps(panel.scale + t * 16);
    for (int r = 0; r < rows; r++) {
      const int32_t* at = whole + 2 * r * PANEL + t * 16;
      __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(at), correction));
      __m512 low = _mm512_cvtepi32_ps(_mm512_loadu_si512(at + PANEL));
      __m512 both = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
      _mm512_storeu_ps(sum + r * PANEL + t * 16, _mm512_mul_ps(both, _mm512_mul_ps(column, _mm512_set1_ps(scale[r]))));
    }
  }
}

}  // namespace
