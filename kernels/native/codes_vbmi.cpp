// Codes of a cache (eight.h) as tiles of bf16 for processors with AVX-512 VBMI: a code's two bytes are looked up.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#include <immintrin.h>

#include "attention_loops.h"
#include "isa.h"

namespace {

// The bf16 of magnitude * 2^-down, of up to 8 bits.
constexpr uint16_t whole_bits(int magnitude, int down) {
  if (!magnitude) return 0;
  int top = 7;
  while (!(magnitude >> top)) top--;
  return uint16_t((127 - down + top) << 7 | ((magnitude << (7 - top)) & 0x7f));
}

// Of a code without its sign.
template <Bits BITS>
constexpr uint16_t bits_of_code(int code) {
  if (BITS == Bits::int8) return whole_bits(code, 0);
  if (code == 0x7f) return 0x7fc0;
  return code < 8 ? whole_bits(code, 9) : uint16_t((code >> 3) + 120) << 7 | uint16_t(code & 7) << 4;
}

template <Bits BITS>
struct Bytes {
  uint8_t low[128], high[128];
  constexpr Bytes() : low(), high() {
    for (int code = 0; code < 128; code++) low[code] = bits_of_code<BITS>(code) & 0xff, high[code] = bits_of_code<BITS>(code) >> 8;
  }
};
template <Bits BITS>
constexpr Bytes<BITS> bytes;

template <Bits BITS>
struct LookUp {
  INLINE LookUp() {
    for (int i = 0; i < 2; i++) low[i] = load_raw<__m512i>(bytes<BITS>.low + 64 * i), high[i] = load_raw<__m512i>(bytes<BITS>.high + 64 * i);
    sign = _mm512_set1_epi8(char(0x80));
  }

  // Low and high bytes of 64 codes, side by side in the order of _mm512_unpacklo_epi8 and _mm512_unpackhi_epi8.
  INLINE void widen(__m512i code, __m512i* first, __m512i* second) const {
    constexpr int a_or_b_and_c = 0xf8;
    __m512i index = BITS == Bits::int8 ? _mm512_abs_epi8(code) : code;  // whose highest bit is passed over
    __m512i l = _mm512_permutex2var_epi8(low[0], index, low[1]);
    __m512i h = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high[0], index, high[1]), code, sign, a_or_b_and_c);
    *first = _mm512_unpacklo_epi8(l, h), *second = _mm512_unpackhi_epi8(l, h);
  }

 private:
  __m512i low[2], high[2], sign;
};

template <Bits BITS>
void keys_of(const uint8_t* rows, size_t stride, int size, bf16* tile) {
  const LookUp<BITS> look_up;
  for (int first = 0; first < size; first += 64) {
    const int words = size - first < 64 ? (size - first) / 4 : 16;
    u32v line[16];
    for (int t = 0; t < TILE_TOKENS; t++)
      line[t] = (u32v)_mm512_maskz_loadu_epi32(__mmask16((1u << words) - 1), rows + t * stride + first);
    transpose(line);
    for (int i = 0; i < words; i++, tile += 64) {
      __m512i a, b;  // of tokens' four codes the pairs, two tokens of each four
      look_up.widen((__m512i)line[i], &a, &b);
      _mm512_storeu_ps(tile, _mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0x88));
      _mm512_storeu_ps(tile + 32, _mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0xdd));
    }
  }
}

// 64 columns of a pair of tokens as four lines of a panel, or of a tile of values, `step` apart.
template <Bits BITS>
INLINE void lines_of(const LookUp<BITS>& look_up, const uint8_t* code, size_t stride, bf16* line, int step) {
  // Columns in the order in which two interleavings leave them in theirs.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i even = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(code));
  __m512i odd = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(code + stride));
  __m512i lines[4];
  look_up.widen(_mm512_unpacklo_epi8(even, odd), &lines[0], &lines[1]);
  look_up.widen(_mm512_unpackhi_epi8(even, odd), &lines[2], &lines[3]);
  for (int i = 0; i < 4; i++) _mm512_storeu_si512(line + i * step, lines[i]);
}

template <Bits BITS>
void values_of(const uint8_t* rows, size_t stride, int size, bf16* tile) {
  const LookUp<BITS> look_up;
  for (int first = 0; first < size; first += 64)
    for (int t = 0; t < TILE_TOKENS; t += 2, tile += 128) lines_of(look_up, rows + first + t * stride, stride, tile, 32);
}

}  // namespace

void widen_keys_vbmi(const void* rows, size_t stride, int size, Bits bits, bf16* tile) {
  const uint8_t* code = static_cast<const uint8_t*>(rows);
  bits == Bits::int8 ? keys_of<Bits::int8>(code, stride, size, tile) : keys_of<Bits::fp8>(code, stride, size, tile);
}

void widen_values_vbmi(const void* rows, size_t stride, int size, Bits bits, bf16* tile) {
  const uint8_t* code = static_cast<const uint8_t*>(rows);
  if (value_width(size) != 4) return widen_values(rows, stride, size, bits, tile);
  bits == Bits::int8 ? values_of<Bits::int8>(code, stride, size, tile) : values_of<Bits::fp8>(code, stride, size, tile);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
