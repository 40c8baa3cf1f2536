// Rows as whole numbers of 16 bits whose two bytes have signs, for products with codes of few bits (int4.h, ggml.h), with
// AVX-512.
#pragma once
#include "int8_rows.h"

namespace {

constexpr int MOST_WORD = 32639;  // so that both bytes of a number have signs

INLINE size_t numbers_of(int inputs) { return size_t(int8_blocks(inputs)) * INT8_INPUTS; }

// A line of codes gives eight inputs of a column: its lower codes 0, 4, 1 and 5, its upper ones 2, 6, 3 and 7.
INLINE __m128i in_code_order(__m128i bytes) {
  return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
}

// The row's high bytes and then its low ones, zeros past the last; put(i, sum of numbers i to i + 15) for each sixteen.
template <class Put>
INLINE void row_to_words(const bf16* x, int size, const ByteRows& to, int row, const Put& put) {
  uint8_t *high = to.data + 2 * row * to.stride, *low = high + to.stride;
  unsigned bits = most_bits(x, size) << 16;
  float most;
  memcpy(&most, &bits, 4);
  bool finite = bits < 0x7f800000u;
  to.scale[row] = finite ? most / MOST_WORD : NAN;
  float inverse = finite && most > LEAST_ROW ? MOST_WORD / most : 0.0f;
  for (size_t i = 0, numbers = numbers_of(size); i < numbers; i += 16) {
    int left = size - int(i);
    __mmask16 some = left >= 16 ? 0xffff : left > 0 ? __mmask16((1u << left) - 1) : 0;
    __m256i narrow = finite ? _mm256_maskz_loadu_epi16(some, x + i) : _mm256_setzero_si256();
    __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(wide, _mm512_set1_ps(inverse)));
    put(i, _mm512_reduce_add_epi32(number));
    __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)(low + i), in_code_order(_mm512_cvtepi32_epi8(number)));
    _mm_storeu_si128((__m128i*)(high + i), in_code_order(_mm512_cvtepi32_epi8(upper)));
  }
}

}  // namespace
