// Compaction and expansion of bf16 weights with 64-byte vectors (compact.h says what a unit is).
#pragma once
#include <immintrin.h>

#include "compact.h"

namespace {

void expand(const uint8_t* units, int count, const uint8_t* high, bf16* out, const char* ahead) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)high)), mask = _mm512_set1_epi8(15);
  for (int i = 0; i < count; i++, units += UNIT_BYTES, out += UNIT) {
    __m512i codes = _mm512_loadu_si512(units);
    for (int half = 0; half < 2; half++) {
      __m512i low = _mm512_loadu_si512(units + 64 * (1 + half));
      __m512i code = _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, mask);
      __m512i top = _mm512_shuffle_epi8(bytes, code);
      _mm512_storeu_si512(out + half * 64, _mm512_unpacklo_epi8(low, top));
      _mm512_storeu_si512(out + half * 64 + 32, _mm512_unpackhi_epi8(low, top));
    }
    if (!ahead) continue;
    for (int line = 0; line < UNIT_BYTES; line += 64) _mm_prefetch(ahead + i * UNIT_BYTES + line, _MM_HINT_T1);
  }
}

// Of 64 weights: the low bytes to `low`, the codes as bytes; bit i of the result says that weight i has none.
INLINE uint64_t split(const bf16* w, const uint8_t* high, uint8_t* low, __m512i* code) {
  __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 32), mask = _mm512_set1_epi16(255);
  _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(first, mask), _mm512_and_si512(second, mask)));
  __m512i top = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
  __mmask64 found = 0;
  *code = _mm512_setzero_si512();
  for (int k = 0; k < 16; k++) {
    __mmask64 here = _mm512_cmpeq_epi8_mask(top, _mm512_set1_epi8((char)high[k]));
    *code = _mm512_mask_mov_epi8(*code, here, _mm512_set1_epi8((char)k));
    found |= here;
  }
  uint64_t missing = 0;  // back from the order of packed bytes to that of weights
  for (uint64_t bits = ~(uint64_t)found; bits; bits &= bits - 1) {
    int at = __builtin_ctzll(bits), lane = at / 16, within = at % 16;
    missing |= 1ull << (within / 8 * 32 + lane * 8 + within % 8);
  }
  return missing;
}

void compact(const bf16* panel, int count, const uint8_t* high, uint8_t* units, uint64_t* missing) {
  for (int i = 0; i < count; i++, panel += UNIT, units += UNIT_BYTES, missing += 2) {
    __m512i even, odd;
    missing[0] = split(panel, high, units + 64, &even);
    missing[1] = split(panel + 64, high, units + 128, &odd);
    _mm512_storeu_si512(units, _mm512_or_si512(even, _mm512_slli_epi16(odd, 4)));
  }
}

}  // namespace
