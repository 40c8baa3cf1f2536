// Products of rows in 8 bits with ggml's types (ggml.h), for AVX2: which codes and scales of bytes_avx2.h those are.
#pragma once
#include "bytes_avx2.h"
#include "ggml.h"

namespace {

INLINE __m128i eight_at(const void* at) { return _mm_loadl_epi64((const __m128i*)at); }

// Eight scales and eight minima of 6 bits (ggml.h), a byte each once for all rows.
struct MinimaScales {
  static constexpr int parts = 1;
  static constexpr bool minima = true;
  const char* at;
  alignas(32) uint8_t scale[8][PANEL], least_of[8][PANEL];

  static size_t bytes(Scale) { return 16 * PANEL; }
  INLINE MinimaScales(const char* at, Scale) : at(at) {
    const __m256i six = _mm256_set1_epi8(63), four = _mm256_set1_epi8(15), top = _mm256_set1_epi8(48);
    for (int i = 0; i < 4; i++)
      for (int c = 0; c < PANEL; c += 32) {
        const char* kinds = at + 256 + i * PANEL + c;
        __m256i first = bytes_at(kinds), second = bytes_at(kinds + 4 * PANEL), third = bytes_at(kinds + 8 * PANEL);
        auto put = [&](uint8_t* to, __m256i bytes) { _mm256_store_si256((__m256i*)(to + c), bytes); };
        auto joined = [&](__m256i low, __m256i high) {
          return _mm256_or_si256(_mm256_and_si256(low, four), _mm256_and_si256(_mm256_srli_epi16(high, 2), top));
        };
        put(scale[i], _mm256_and_si256(first, six)), put(scale[i + 4], joined(third, first));
        put(least_of[i], _mm256_and_si256(second, six)), put(least_of[i + 4], joined(_mm256_srli_epi16(third, 4), second));
      }
  }
  INLINE __m256 times(int kind, const uint8_t* bytes, int column) const {
    return _mm256_mul_ps(halves_at(at + kind * 128 + column * 2), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_at(bytes + column))));
  }
  INLINE __m256 step(int block, int, int column) const { return times(0, scale[block], column); }
  INLINE __m256 least(int block, int column) const { return times(1, least_of[block], column); }
};

// A scale of 8 bits for each sixteen inputs.
struct SixteenScales {
  static constexpr int parts = 2;
  static constexpr bool minima = false;
  const char* at;

  INLINE SixteenScales(const char* at, Scale) : at(at) {}
  static size_t bytes(Scale) { return 18 * PANEL; }
  INLINE __m256 step(int block, int part, int column) const {
    __m256i bytes = _mm256_cvtepi8_epi32(eight_at(at + (2 + 2 * block + part) * PANEL + column));
    return _mm256_mul_ps(halves_at(at + column * 2), _mm256_cvtepi32_ps(bytes));
  }
};

constexpr decltype(&gemm_codes<Int4Codes>) gemm_ggml_of[GGML_TYPES] = {
    gemm_codes<Int4Codes>,
    gemm_codes<Codes<5, 16, GroupScales>>,
    gemm_codes<Codes<8, 128, GroupScales>>,
    gemm_codes<Codes<4, 0, MinimaScales>>,
    gemm_codes<Codes<5, 0, MinimaScales>>,
    gemm_codes<Codes<6, 32, SixteenScales>>};

void gemm_ggml_bytes(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next next) {
  gemm_ggml_of[int(panel.type)](a, rows, {panel.data, panel.blocks, ggml_shape(panel.type).blocks(), Scale::f16}, sum, next);
}

}  // namespace
