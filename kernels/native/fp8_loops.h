// FP8 codes (fp8.h) as bf16 numbers, which hold them exactly. A bf16 of code seeemmm (e above 0) is, high byte, s and
// 60 + eee / 2; low byte, the lower four bits moved up. So a byte follows from the upper four bits and one from the lower
// four, but where eee is 0 or 1: there both follow from the lower four.
#pragma once
#include "isa.h"
#include "vec.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int FP8_AHEAD = 4096;  // bytes

alignas(16) const uint8_t FP8_HIGH[16] = {60, 61, 62, 63, 64, 65, 66, 67, 188, 189, 190, 191, 192, 193, 194, 195};
alignas(16) const uint8_t FP8_SMALL_HIGH[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 60, 60, 60, 60, 60, 60, 60, 60};
alignas(16) const uint8_t FP8_SMALL_LOW[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60,
                                               0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};

#if defined(__x86_64__) && VECTOR_BYTES == 64
struct Fp8Tables {
  static INLINE __m512i table(const uint8_t* of) { return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)of)); }
  INLINE Fp8Tables()  // written out, or the compiler makes it for any processor
      : highs(table(FP8_HIGH)), small_highs(table(FP8_SMALL_HIGH)), small_lows(table(FP8_SMALL_LOW)),
        four(_mm512_set1_epi8(15)), size(_mm512_set1_epi8(0x70)), sign(_mm512_set1_epi8((char)0x80)) {}
  const __m512i highs, small_highs, small_lows, four, size, sign;
};

// 64 codes as two lines of a tile.
INLINE void widen_fp8_line(const char* codes, const Fp8Tables& t, __m512i (&line)[2]) {
  __m512i code = _mm512_loadu_si512(codes), lower = _mm512_and_si512(code, t.four);
  __m512i upper = _mm512_and_si512(_mm512_srli_epi16(code, 4), t.four);
  __mmask64 small = _mm512_testn_epi8_mask(code, t.size);
  __m512i high = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(t.highs, upper), small, t.small_highs, lower);
  high = _mm512_ternarylogic_epi32(high, code, t.sign, 0xf8);  // high | code & sign
  __m512i low = _mm512_mask_shuffle_epi8(_mm512_slli_epi16(lower, 4), small, t.small_lows, lower);
  line[0] = _mm512_unpacklo_epi8(low, high), line[1] = _mm512_unpackhi_epi8(low, high);
}

void widen_fp8(const char* codes, int lines, bf16* out) {
  const Fp8Tables tables;
  for (int i = 0; i < lines; i++, codes += 64, out += 64) {
    __m512i line[2];
    widen_fp8_line(codes, tables, line);
    for (int l = 0; l < 2; l++) _mm512_storeu_si512(out + 32 * l, line[l]);
    __builtin_prefetch(codes + FP8_AHEAD);
  }
}
#elif defined(__x86_64__) && VECTOR_BYTES == 32
struct Fp8Tables {
  static INLINE __m256i table(const uint8_t* of) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)of));
  }
  INLINE Fp8Tables()  // written out, or the compiler makes it for any processor
      : highs(table(FP8_HIGH)), small_highs(table(FP8_SMALL_HIGH)), small_lows(table(FP8_SMALL_LOW)),
        four(_mm256_set1_epi8(15)), size(_mm256_set1_epi8(0x70)), sign(_mm256_set1_epi8((char)0x80)) {}
  const __m256i highs, small_highs, small_lows, four, size, sign;
};

// 32 codes as columns of two lines of a tile.
INLINE void widen_fp8_half(const char* codes, const Fp8Tables& t, __m256i (&line)[2]) {
  __m256i code = _mm256_loadu_si256((const __m256i*)codes), lower = _mm256_and_si256(code, t.four);
  __m256i upper = _mm256_and_si256(_mm256_srli_epi16(code, 4), t.four);
  __m256i small = _mm256_cmpeq_epi8(_mm256_and_si256(code, t.size), _mm256_setzero_si256());
  __m256i small_high = _mm256_or_si256(_mm256_shuffle_epi8(t.small_highs, lower), _mm256_and_si256(code, t.sign));
  __m256i high = _mm256_blendv_epi8(_mm256_shuffle_epi8(t.highs, upper), small_high, small);
  __m256i low = _mm256_blendv_epi8(_mm256_slli_epi16(lower, 4), _mm256_shuffle_epi8(t.small_lows, lower), small);
  line[0] = _mm256_unpacklo_epi8(low, high), line[1] = _mm256_unpackhi_epi8(low, high);
}

void widen_fp8(const char* codes, int lines, bf16* out) {
  const Fp8Tables tables;
  for (int i = 0; i < lines; i++, codes += 64, out += 64) {
    for (int v = 0; v < 2; v++) {
      __m256i line[2];
      widen_fp8_half(codes + 32 * v, tables, line);
      for (int l = 0; l < 2; l++) _mm256_storeu_si256((__m256i*)(out + 32 * l + 16 * v), line[l]);
    }
    __builtin_prefetch(codes + FP8_AHEAD);
  }
}
#elif defined(__aarch64__)
void widen_fp8(const char* codes, int lines, bf16* out) {
  const uint8x16_t highs = vld1q_u8(FP8_HIGH), small_highs = vld1q_u8(FP8_SMALL_HIGH), small_lows = vld1q_u8(FP8_SMALL_LOW);
  for (int i = 0; i < lines; i++, codes += 64, out += 64)
    for (int lane = 0; lane < 4; lane++) {
      uint8x16_t code = vld1q_u8((const uint8_t*)codes + 16 * lane), lower = vandq_u8(code, vdupq_n_u8(15));
      uint8x16_t small = vceqzq_u8(vandq_u8(code, vdupq_n_u8(0x70))), signs = vandq_u8(code, vdupq_n_u8(0x80));
      uint8x16_t small_high = vorrq_u8(vqtbl1q_u8(small_highs, lower), signs);
      uint8x16_t high = vbslq_u8(small, small_high, vqtbl1q_u8(highs, vshrq_n_u8(code, 4)));
      uint8x16_t low = vbslq_u8(small, vqtbl1q_u8(small_lows, lower), vshlq_n_u8(code, 4));
      vst1q_u8((uint8_t*)(out + 8 * lane), vzip1q_u8(low, high));
      vst1q_u8((uint8_t*)(out + 32 + 8 * lane), vzip2q_u8(low, high));
    }
}
#else
void widen_fp8(const char* codes, int lines, bf16* out) {
  for (int i = 0; i < lines; i++, codes += 64, out += 64)
    for (int at = 0; at < 64; at++) {
      uint8_t code = uint8_t(codes[at]), lower = code & 15;
      bool small = !(code & 0x70);
      uint8_t high = small ? FP8_SMALL_HIGH[lower] | (code & 0x80) : FP8_HIGH[code >> 4];
      uint8_t low = small ? FP8_SMALL_LOW[lower] : uint8_t(lower << 4);
      out[at % 16 / 8 * 32 + at / 16 * 8 + at % 8].bits = uint16_t(high << 8 | low);
    }
}
#endif

}  // namespace
