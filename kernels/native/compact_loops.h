// Compaction and expansion of bf16 weights with 64-byte vectors (compact.h says what a unit is).
#pragma once
#include <immintrin.h>

#include "compact.h"

namespace {

// The sixteen high bytes of a panel, ready for lookups.
struct HighBytes {
  explicit HighBytes(const uint8_t* high) : bytes(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)high))) {}
  const __m512i bytes, mask = _mm512_set1_epi8(15);
};

// Two of a unit's four lines: its first 64 weights or the others.
INLINE void expand_half(const uint8_t* unit, int half, const HighBytes& high, __m512i (&line)[2]) {
  __m512i codes = _mm512_loadu_si512(unit), low = _mm512_loadu_si512(unit + 64 * (1 + half));
  __m512i code = _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, high.mask);
  __m512i top = _mm512_shuffle_epi8(high.bytes, code);
  line[0] = _mm512_unpacklo_epi8(low, top);
  line[1] = _mm512_unpackhi_epi8(low, top);
}

void expand(const uint8_t* units, int count, const uint8_t* high, bf16* out, const char* ahead) {
  const HighBytes bytes(high);
  for (int i = 0; i < count; i++, units += UNIT_BYTES, out += UNIT) {
    for (int half = 0; half < 2; half++) {
      __m512i line[2];
      expand_half(units, half, bytes, line);
      for (int l = 0; l < 2; l++) _mm512_storeu_si512(out + half * 64 + l * 32, line[l]);
    }
    if (!ahead) continue;
    for (int at = 0; at < UNIT_BYTES; at += 64) _mm_prefetch(ahead + i * UNIT_BYTES + at, _MM_HINT_T1);
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
