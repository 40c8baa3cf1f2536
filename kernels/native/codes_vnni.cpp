// Products with codes of a cache for processors with AVX-512 VNNI.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#include <immintrin.h>
#include <math.h>

#include <algorithm>

#include "attention_loops.h"
#include "codes.h"
#include "isa.h"

namespace {

// Calls work(first row, rows) for all rows, at most MOST at a time.
template <int MOST, class Work>
INLINE void in_groups(int rows, const Work& work) {
  for (int r = 0; r < rows; r += MOST) work(r, std::min(MOST, rows - r));
}

// Sixteen tokens' words of four codes, lanes the tokens, times the pairs of R rows.
template <int R>
void score_rows(const int32_t* pair, int step, const __m512i* word, int words, __m512i* total) {
  __m512i sum[R];
  for (int r = 0; r < R; r++) sum[r] = total[r];
  for (int i = 0; i < words; i++, pair += 2 * step) {
    __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(word[i], 8), 8), odd = _mm512_srai_epi16(word[i], 8);
    for (int r = 0; r < R; r++) {
      sum[r] = _mm512_dpwssd_epi32(sum[r], even, _mm512_set1_epi32(pair[r]));
      sum[r] = _mm512_dpwssd_epi32(sum[r], odd, _mm512_set1_epi32(pair[step + r]));
    }
  }
  for (int r = 0; r < R; r++) total[r] = sum[r];
}
constexpr decltype(&score_rows<1>) score_some[] = {nullptr,       score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>,
                                                   score_rows<5>, score_rows<6>, score_rows<7>, score_rows<8>};

// A row's weights of sixteen tokens, times the scales of their values, as whole numbers; returns what one of these is worth.
INLINE float whole_weights(const bf16* weight, const float* scale, int16_t* whole) {
  __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_raw<__m256i>(weight)), 16);
  __m512 w = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_loadu_ps(scale));
  bool finite = _mm512_cmp_ps_mask(w, _mm512_set1_ps(3.402823466e38f), _CMP_LE_OQ) == 0xffff;
  float most = _mm512_reduce_max_ps(w);
  __m512 factor = _mm512_set1_ps(finite && most > 0 ? MOST_WHOLE / most : 0.0f);
  __m512i rounded = finite ? _mm512_cvtps_epi32(_mm512_mul_ps(w, factor)) : _mm512_setzero_si512();
  __m256i narrow = _mm512_cvtepi32_epi16(rounded);
  memcpy(whole, &narrow, sizeof narrow);
  return finite ? most / MOST_WHOLE : NAN;
}

// 64 columns of sixteen tokens, or fewer, times R rows of weights.
template <int R>
void value_rows(const int16_t* whole, const float* worth, const uint8_t* code, size_t stride, __mmask64 there, float* sum) {
  // Columns in the order in which unpacking leaves them in theirs.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  __m512i total[R][4] = {};
  for (int p = 0; p < TILE_TOKENS / 2; p++, code += 2 * stride) {
    __m512i a = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(there, code));
    __m512i b = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(there, code + stride));
    __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
    __m512i pairs[4] = {_mm512_cvtepi8_epi16(_mm512_castsi512_si256(low)), _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(low, 1)),
                        _mm512_cvtepi8_epi16(_mm512_castsi512_si256(high)), _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(high, 1))};
    for (int r = 0; r < R; r++) {
      int32_t two;
      memcpy(&two, whole + r * TILE_TOKENS + 2 * p, 4);
      __m512i x = _mm512_set1_epi32(two);
      for (int c = 0; c < 4; c++) total[r][c] = _mm512_dpwssd_epi32(total[r][c], pairs[c], x);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 4; c++) {
      float* to = sum + r * PANEL + c * 16;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[r][c]), _mm512_set1_ps(worth[r]), _mm512_loadu_ps(to)));
    }
}
constexpr decltype(&value_rows<1>) value_some[] = {nullptr, value_rows<1>, value_rows<2>, value_rows<3>, value_rows<4>};

void score_tile(const CodeQueries& q, const uint8_t* code, size_t stride, int size, const float* scale, float* score, size_t row) {
  const __m512 keys = _mm512_loadu_ps(scale);
  in_groups<8>(q.rows, [&](int r, int n) {
    __m512i total[8] = {};
    for (int first = 0; first < size; first += 64) {
      int words = std::min(size - first, 64) / 4;
      u32v line[16];
      for (int t = 0; t < TILE_TOKENS; t++)
        line[t] = (u32v)_mm512_maskz_loadu_epi32(__mmask16((1u << words) - 1), code + t * stride + first);
      transpose(line);
      score_some[n](q.word + size_t(first) / 2 * q.rows + r, q.rows, (const __m512i*)line, words, total);
    }
    for (int i = 0; i < n; i++)
      _mm512_storeu_ps(score + (r + i) * row,
                       _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(total[i]), _mm512_set1_ps(q.scale[r + i])), keys));
  });
}

void add_tile(const bf16* weights, size_t stride, int rows, const uint8_t* code, size_t code_stride, int size, const float* scale,
              float* sum, size_t panel_step) {
  in_groups<4>(rows, [&](int r, int n) {
    int16_t whole[4 * TILE_TOKENS];
    float worth[4];
    for (int i = 0; i < n; i++) worth[i] = whole_weights(weights + (r + i) * stride, scale, whole + i * TILE_TOKENS);
    for (int first = 0, p = 0; first < size; first += PANEL, p++) {
      int columns = std::min(size - first, PANEL);
      __mmask64 there = columns == PANEL ? ~0ull : (1ull << columns) - 1;
      value_some[n](whole, worth, code + first, code_stride, there, sum + p * panel_step + size_t(r) * PANEL);
    }
  });
}

}  // namespace

void to_codes_vnni(const bf16* q, int size, int row, const CodeQueries& to) {
  const float factor = whole_factor(q, size, to.scale + row);
  auto whole = [&](int i) { return uint32_t(uint16_t(int16_t(factor ? lrintf(to_float(q[i]) * factor) : 0))); };
  for (int i = 0; i < size; i += 4) {
    int32_t* word = to.word + i / 2 * to.rows + row;
    word[0] = int32_t(whole(i) | whole(i + 2) << 16);
    word[to.rows] = int32_t(whole(i + 1) | whole(i + 3) << 16);
  }
}

void score_codes_vnni(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const float* scale,
                      float* score, size_t row, size_t step) {
  for (int t = 0; t < tiles; t++)
    score_tile(q, code[t], stride, size, scale + t * TILE_TOKENS, score + t / 4 * step + t % 4 * TILE_TOKENS, row);
}

void add_codes_vnni(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                    const float* scale, float* sum, size_t panel_step) {
  for (int t = 0; t < tiles; t++)
    add_tile(weights + t * TILE_TOKENS, stride, rows, code[t], code_stride, size, scale + t * TILE_TOKENS, sum, panel_step);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
