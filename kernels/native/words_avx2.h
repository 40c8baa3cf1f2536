// What products of rows as whole numbers share with AVX2 (bytes_avx2.h, codes_avx2.h).
#pragma once
#include <math.h>

#include "int4.h"
#include "int8.h"
#include "vec.h"

namespace {

constexpr int WORD_MOST = 32767;
constexpr float WORD_LEAST_ROW = 1e-30f;  // the largest number of a row below which it counts as zeros: 1 / x must be a float
constexpr int WORD_AHEAD = 2048;          // bytes that are asked for early

INLINE __m256i sixteen(const bf16* x, int left) {
  if (left >= 16) return _mm256_loadu_si256((const __m256i*)x);
  bf16 some[16] = {};
  if (left > 0) memcpy(some, x, left * sizeof(bf16));
  return _mm256_loadu_si256((const __m256i*)some);
}

INLINE unsigned most_of_sixteen(__m256i words) {
  __m128i half = _mm_max_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  __m128i inverted = _mm_xor_si128(half, _mm_set1_epi16(-1));  // the least of these is the instruction there is
  return 0xffffu ^ unsigned(_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

INLINE __m256i numbers_of(__m128i eight, float inverse) {
  __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(wide), _mm256_set1_ps(inverse)));
}

INLINE size_t words_of_inputs(int inputs) { return size_t(int8_blocks(inputs)) * INT8_INPUTS; }

INLINE __m256i word_pair(const int16_t* x) {
  int pair;
  memcpy(&pair, x, 4);
  return _mm256_set1_epi32(pair);
}

// What is read next: past `end`, what lies at `after`.
struct WordsAhead {
  const char *end, *after;
  INLINE const char* of(const void* at) const {
    const char* early = static_cast<const char*>(at) + WORD_AHEAD;
    return early < end ? early : after + (early - end);
  }
};

// Calls work(first row, rows) for all rows, in as few groups of at most `most` as there are and all alike.
template <class Work>
INLINE void in_word_groups(int rows, int most, const Work& work) {
  int groups = (rows + most - 1) / most;
  for (int i = 0, r = 0; i < groups; i++) {
    int n = (rows - r) / (groups - i);
    work(r, n);
    r += n;
  }
}

}  // namespace
