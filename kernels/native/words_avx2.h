// Products of rows as whole numbers of 16 bits with int8 weights, for AVX2: VPMADDWD multiplies pairs of 16 bits,
// and VPDPWSSD adds them too where the including file has AVX-VNNI (HAS_VNNI). A row's numbers lie at data + 2 r * stride of
// a ByteRows. Sums of a block are exact and are added in float in ascending order of blocks, so a row's bits depend on no
// batch, nor on which of the two instructions there is.
#pragma once
#include <math.h>

#include "int4.h"
#include "int8.h"
#include "vec.h"

namespace {

constexpr int WORD_MOST = 32767;
constexpr float WORD_LEAST_ROW = 1e-30f;  // the largest number of a row below which it counts as zeros: 1 / x must be a float
constexpr int WORD_ROWS = 5;              // their sums are 10 of the 16 registers
constexpr int WORD_AHEAD = 2048;          // bytes that are asked for early
constexpr int WORD_CHUNK = 8192;          // bytes of weights that several groups of rows take in turn

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

// The largest magnitude of a row as the bits of a bf16, which order as whole numbers do.
INLINE unsigned most_word(const bf16* x, int size) {
  __m256i most = _mm256_setzero_si256();
  for (int i = 0; i < size; i += 16)
    most = _mm256_max_epu16(most, _mm256_and_si256(sixteen(x + i, size - i), _mm256_set1_epi16(0x7fff)));
  return most_of_sixteen(most);
}

INLINE __m256i numbers_of(__m128i eight, float inverse) {
  __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(wide), _mm256_set1_ps(inverse)));
}

INLINE size_t words_of_inputs(int inputs) { return size_t(int8_blocks(inputs)) * INT8_INPUTS; }

// Of every four numbers the second and the third change places.
void row_to_words(const bf16* x, int size, const ByteRows& to, int row) {
  int16_t* out = reinterpret_cast<int16_t*>(to.data + 2 * row * to.stride);
  unsigned bits = most_word(x, size) << 16;
  float most;
  memcpy(&most, &bits, 4);
  bool finite = bits < 0x7f800000u;
  to.scale[row] = finite ? most / WORD_MOST : NAN;
  float inverse = finite && most > WORD_LEAST_ROW ? WORD_MOST / most : 0.0f;
  for (int i = 0; i < int(to.stride); i += 16) {
    __m256i narrow = finite ? sixteen(x + i, size - i) : _mm256_setzero_si256();
    __m256i low = numbers_of(_mm256_castsi256_si128(narrow), inverse);
    __m256i high = numbers_of(_mm256_extracti128_si256(narrow, 1), inverse);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i*)(out + i), words);
  }
}

INLINE __m256i word_pair(const int16_t* x) {
  int pair;
  memcpy(&pair, x, 4);
  return _mm256_set1_epi32(pair);
}

INLINE __m256i plus_products(__m256i total, __m256i a, __m256i b) {
#ifdef HAS_VNNI
  return _mm256_dpwssd_avx_epi32(total, a, b);
#endif
  return _mm256_add_epi32(total, _mm256_madd_epi16(a, b));
}

// What is read next: past `end`, what lies at `after`.
struct WordsAhead {
  const char *end, *after;
  INLINE const char* of(const void* at) const {
    const char* early = static_cast<const char*>(at) + WORD_AHEAD;
    return early < end ? early : after + (early - end);
  }
};

// sum[R][64] += the products of so many blocks, without any scale. A line of a tile has four inputs of 16 columns.
template <int R>
NOINLINE void int8_words(const int16_t* a, size_t stride, const int8_t* at, int blocks, float* sum, bool add,
                         const WordsAhead& ahead) {
  for (int b = 0; b < blocks; b++, a += INT8_INPUTS, add = true) {
    for (int t = 0; t < 4; t++) {
      const char* early = ahead.of(at);
      __m256i total[R][2];
      for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm256_setzero_si256();
      for (int i = 0; i < INT8_INPUTS; i += 4, at += 64, early += 64) {
        _mm_prefetch(early, _MM_HINT_T0);
        __m256i even[2], odd[2];
        for (int v = 0; v < 2; v++) {
          __m256i w = _mm256_loadu_si256((const __m256i*)(at + v * 32));
          even[v] = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
          odd[v] = _mm256_srai_epi16(w, 8);
        }
        for (int r = 0; r < R; r++) {
          __m256i x = word_pair(a + r * stride + i), y = word_pair(a + r * stride + i + 2);
          for (int v = 0; v < 2; v++) total[r][v] = plus_products(plus_products(total[r][v], even[v], x), odd[v], y);
        }
      }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) {
          float* to = sum + r * PANEL + t * 16 + v * 8;
          __m256 part = _mm256_cvtepi32_ps(total[r][v]);
          _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), part) : part);
        }
    }
  }
}

constexpr decltype(&int8_words<1>) int8_words_of[] = {nullptr,       int8_words<1>, int8_words<2>,
                                                      int8_words<3>, int8_words<4>, int8_words<5>};
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

INLINE const int16_t* words_of(const ByteRows& a, int row) {
  return reinterpret_cast<const int16_t*>(a.data + 2 * row * a.stride);
}

void gemm_int8_words(const ByteRows& a, int rows, const Int8Panel& panel, float* sum, Next next) {
  constexpr int chunk = WORD_CHUNK / INT8_BLOCK;
  WordsAhead ahead{reinterpret_cast<const char*>(panel.data) + size_t(panel.blocks) * INT8_BLOCK, next.data};
  int step = rows <= WORD_ROWS ? panel.blocks : chunk;
  for (int b = 0; b < panel.blocks; b += step) {
    int n = panel.blocks - b < step ? panel.blocks - b : step;
    in_word_groups(rows, WORD_ROWS, [&](int r, int some) {
      int8_words_of[some](words_of(a, r) + b * INT8_INPUTS, a.stride, panel.data + size_t(b) * INT8_BLOCK, n,
                          sum + r * PANEL, b > 0, ahead);
    });
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) {
      float* to = sum + r * PANEL + c;
      store(to, load(to) * (load(panel.scale + c) * splat(a.scale[r])));
    }
}

}  // namespace
