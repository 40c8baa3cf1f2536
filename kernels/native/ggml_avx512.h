// What products with ggml's types (ggml.h) have in common with AVX-512: codes as bytes, scales as floats, and what becomes of
// sums of whole numbers.
#pragma once
#include "isa.h"
#include "vec.h"
#include "words_vnni.h"

namespace {

// Where the field of vector V is that becomes bits 4 and up.
template <int SHIFT>
INLINE __m512i moved(__m512i fields, int mask) {
  if constexpr (SHIFT > 0) fields = _mm512_slli_epi16(fields, SHIFT);
  if constexpr (SHIFT < 0) fields = _mm512_srli_epi16(fields, -SHIFT);
  return _mm512_and_si512(fields, _mm512_set1_epi8(char(mask)));
}

// Vectors 2 LINE and 2 LINE + 1 of a tile, as bytes.
template <int BITS, int LINE>
INLINE void two_vectors(const char* tile, __m512i& first, __m512i& second) {
  if constexpr (BITS == 8) {
    first = _mm512_loadu_si512(tile + LINE * 128), second = _mm512_loadu_si512(tile + LINE * 128 + 64);
    return;
  }
  const __m512i low = _mm512_set1_epi8(15), both = _mm512_loadu_si512(tile + LINE * 64);
  first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  if constexpr (BITS == 5) {
    __m512i fields = _mm512_loadu_si512(tile + 256);
    first = _mm512_or_si512(first, moved<4 - 2 * LINE>(fields, 16));
    second = _mm512_or_si512(second, moved<3 - 2 * LINE>(fields, 16));
  }
  if constexpr (BITS == 6) {
    __m512i fields = _mm512_loadu_si512(tile + 256 + LINE / 2 * 64);
    first = _mm512_or_si512(first, moved<4 - LINE % 2 * 4>(fields, 48));
    second = _mm512_or_si512(second, moved<2 - LINE % 2 * 4>(fields, 48));
  }
}

INLINE __m512 halves_at(const char* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
INLINE __m512 bytes_as_floats(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

struct TileScales {
  __m512 step, least;
};

// Of a block of a group and 16 columns.
template <GgmlType TYPE>
INLINE TileScales scales_of(const char* scales, int block, int half, int tile) {
  __m512 step = halves_at(scales + tile * 32);
  if constexpr (TYPE == GgmlType::q6_k) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)(scales + 128 + (2 * block + half) * 64 + tile * 16));
    return {_mm512_mul_ps(step, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))), step};
  }
  if constexpr (has_minima(TYPE)) {
    const __m128i six = _mm_set1_epi8(63), four = _mm_set1_epi8(15);
    auto at = [&](int i) { return _mm_loadu_si128((const __m128i*)(scales + 256 + i * 64 + tile * 16)); };
    auto top = [&](int i) { return _mm_and_si128(_mm_srli_epi16(at(i), 2), _mm_set1_epi8(48)); };
    __m128i scale, least;
    if (block < 4) {
      scale = _mm_and_si128(at(block), six), least = _mm_and_si128(at(block + 4), six);
    } else {
      __m128i both = at(block + 4);
      scale = _mm_or_si128(_mm_and_si128(both, four), top(block - 4));
      least = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(both, 4), four), top(block));
    }
    return {_mm512_mul_ps(step, bytes_as_floats(scale)), _mm512_mul_ps(halves_at(scales + 128 + tile * 32), bytes_as_floats(least))};
  }
  return {step, step};
}

// Some rows of a product: their bytes, and where sums of sixteens begin behind the high ones.
struct WordRows {
  const uint8_t* data;
  size_t stride, sums;

  INLINE const uint8_t* at(int block) const { return data + size_t(block) * BLOCK; }
  // Of the block, or of half of it.
  template <GgmlType TYPE>
  INLINE int sum(int row, int block, int half) const {
    auto* sixteens = reinterpret_cast<const int32_t*>(data + 2 * row * stride + sums) + 2 * block;
    return TYPE == GgmlType::q6_k ? sixteens[half] : sixteens[0] + sixteens[1];
  }
};

// sum[16] (+)= the parts of a row's high and low bytes, times the scales; `own` is the sum of its numbers.
template <GgmlType TYPE>
INLINE void add_part(__m512i high, __m512i low, int own, const TileScales& scale, float* sum, bool add) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  if (shape.offset) whole = _mm512_sub_epi32(whole, _mm512_set1_epi32(shape.offset * own));
  __m512 part = _mm512_cvtepi32_ps(whole);
  __m512 total = add ? _mm512_fmadd_ps(part, scale.step, _mm512_loadu_ps(sum)) : _mm512_mul_ps(part, scale.step);
  if (has_minima(TYPE)) total = _mm512_fnmadd_ps(_mm512_set1_ps(float(own)), scale.least, total);
  _mm512_storeu_ps(sum, total);
}

INLINE void scale_rows(float* sum, int rows, const float* scale) {
  for (int r = 0; r < rows; r++, sum += PANEL)
    for (int c = 0; c < PANEL; c += 16) _mm512_storeu_ps(sum + c, _mm512_mul_ps(_mm512_loadu_ps(sum + c), _mm512_set1_ps(scale[r])));
}

}  // namespace
