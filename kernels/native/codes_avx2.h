// Products with codes of a cache (codes.h) for AVX2: codes become numbers of 16 bits once for all rows, and pairs of them are
// multiplied by pairs of queries' or weights' whole numbers, which lie as bytes do in codes: of every four the first and the
// third, then the second and the fourth. Sums are exact, so they are the same however they are made.
#pragma once
#include "codes.h"
#include "tiles.h"
#include "words_avx2.h"

namespace {

#ifdef HAS_VNNI
constexpr int PASS_CODES = 3;  // rows of a pass: 12 of the 16 registers are sums
#else
constexpr int PASS_CODES = 5;
#endif
constexpr int NEAR_WEIGHTS = 32;  // rows whose weights stay in the nearest cache
constexpr int WINDOW_CODES = 8;  // tiles whose weights share a scale
constexpr int LINE_WORDS = 32;   // two vectors: pairs of sixteen tokens or columns

// Codes 0 and 2, or 1 and 3, of every four.
INLINE __m256i even_codes(__m256i four) { return _mm256_maddubs_epi16(_mm256_set1_epi16(1), four); }
INLINE __m256i odd_codes(__m256i four) { return _mm256_srai_epi16(four, 8); }

INLINE void put_line(int16_t* line, __m256i first, __m256i second) {
  _mm256_store_si256((__m256i*)line, first);
  _mm256_store_si256((__m256i*)line + 1, second);
}

// The same 16 bytes of two tokens.
INLINE __m256i code_lanes(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load_raw<__m128i>(low)), load_raw<__m128i>(high), 1);
}

// Sixteen tokens' codes as lines whose columns are tokens, two lines for four codes.
INLINE void widen_code_keys(const uint8_t* code, size_t stride, int size, int16_t* line) {
  for (int c = 0; c < size; c += 16, code += 16, line += 8 * LINE_WORDS) {
    __m256i word[2][4];
    for (int half = 0; half < 2; half++) {
      const uint8_t* at = code + half * 8 * stride;
      __m256i x[4];
      for (int i = 0; i < 4; i++) x[i] = code_lanes(at + i * stride, at + (i + 4) * stride);
      __m256i low[2] = {_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpacklo_epi32(x[2], x[3])};
      __m256i high[2] = {_mm256_unpackhi_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[2], x[3])};
      word[half][0] = _mm256_unpacklo_epi64(low[0], low[1]), word[half][1] = _mm256_unpackhi_epi64(low[0], low[1]);
      word[half][2] = _mm256_unpacklo_epi64(high[0], high[1]), word[half][3] = _mm256_unpackhi_epi64(high[0], high[1]);
    }
    for (int w = 0; w < 4; w++) {
      put_line(line + 2 * w * LINE_WORDS, even_codes(word[0][w]), even_codes(word[1][w]));
      put_line(line + (2 * w + 1) * LINE_WORDS, odd_codes(word[0][w]), odd_codes(word[1][w]));
    }
  }
}

// 32 columns of sixteen tokens, or 16, as two runs of lines, `step` apart, each of which has two lines for four tokens. Of the
// first run's columns are 0 .. 3 and 16 .. 19, and then 4 .. 7 and 20 .. 23; of the second the others.
INLINE void widen_code_values(const uint8_t* code, size_t stride, bool all, int16_t* line, size_t step) {
  for (int t = 0; t < TILE_TOKENS; t += 4, code += 4 * stride, line += 2 * LINE_WORDS) {
    __m256i x[4];
    for (int i = 0; i < 4; i++)
      x[i] = all ? load_raw<__m256i>(code + i * stride) : _mm256_zextsi128_si256(load_raw<__m128i>(code + i * stride));
    __m256i low[2] = {_mm256_unpacklo_epi8(x[0], x[1]), _mm256_unpacklo_epi8(x[2], x[3])};
    __m256i high[2] = {_mm256_unpackhi_epi8(x[0], x[1]), _mm256_unpackhi_epi8(x[2], x[3])};
    for (int run = 0; run < 2; run++) {
      const __m256i(&pair)[2] = run ? high : low;
      __m256i first = _mm256_unpacklo_epi16(pair[0], pair[1]), second = _mm256_unpackhi_epi16(pair[0], pair[1]);
      put_line(line + run * step, even_codes(first), even_codes(second));
      put_line(line + run * step + LINE_WORDS, odd_codes(first), odd_codes(second));
    }
  }
}

// total + the products of pairs. As intrinsics GCC 12 moves every sum about.
INLINE __m256i plus_pairs(__m256i total, __m256i a, __m256i b) {
#ifdef HAS_VNNI
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(total) : "x"(a), "x"(b));
#else
  asm("vpaddd %1, %0, %0" : "+x"(total) : "x"(_mm256_madd_epi16(a, b)));
#endif
  return total;
}

// R rows' pairs, `stride` apart, times a line.
template <int R>
INLINE void add_line(const int16_t* a, size_t stride, const int16_t* line, __m256i (&total)[R][2]) {
  const __m256i first = _mm256_load_si256((const __m256i*)line), second = _mm256_load_si256((const __m256i*)line + 1);
#pragma GCC unroll 5
  for (int r = 0; r < R; r++) {
    const __m256i x = word_pair(a + r * stride);
    total[r][0] = plus_pairs(total[r][0], first, x);
    total[r][1] = plus_pairs(total[r][1], second, x);
  }
}

// An even number of lines. Few rows have two sums each, since one waits for the other.
template <int R>
INLINE void multiply_lines(const int16_t* a, size_t stride, const int16_t* line, int lines, __m256i (&total)[R][2]) {
  constexpr int half = R <= 3 ? R : 1;
  __m256i other[half][2] = {};
  const int16_t* end = line + size_t(lines) * LINE_WORDS;
  do {  // as a `for` loop, GCC would move all sums about
    add_line<R>(a, stride, line, total);
    if constexpr (half == R)
      add_line<R>(a + 2, stride, line + LINE_WORDS, other);
    else
      add_line<R>(a + 2, stride, line + LINE_WORDS, total);
    a += 4, line += 2 * LINE_WORDS;
  } while (line != end);
#pragma GCC unroll 5
  for (int r = 0; half == R && r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) total[r][v] = _mm256_add_epi32(total[r][v], other[r][v]);
}

// A tile's codes of which all have the same scales, by token.
struct CodeLines {
  const int16_t* line;
  int lines;
  const float* scale;
};

template <int R>
NOINLINE void score_code_rows(const int16_t* q, size_t stride, const CodeLines& of, const float* worth, bool add, float* score, size_t row) {
  __m256i total[R][2] = {};
  multiply_lines<R>(q, stride, of.line, of.lines, total);
#pragma GCC unroll 5
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      float* to = score + r * row + v * 8;
      __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(total[r][v]), _mm256_set1_ps(worth[r])), scale = _mm256_loadu_ps(of.scale + v * 8);
      _mm256_storeu_ps(to, add ? _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(to)) : _mm256_mul_ps(sum, scale));
    }
}

INLINE void add_eight(__m256i total, float worth, float* sum) {
  _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_set1_ps(worth), _mm256_loadu_ps(sum)));
}

// One run of columns: eight of the first sixteen and, if there are more, eight of the next.
template <int R>
NOINLINE void add_code_rows(const int16_t* weight, size_t stride, const int16_t* line, int lines, const float* worth, bool all, float* sum) {
  __m256i total[R][2] = {};
  multiply_lines<R>(weight, stride, line, lines, total);
#pragma GCC unroll 5
  for (int r = 0; r < R; r++) {
    add_eight(_mm256_permute2x128_si256(total[r][0], total[r][1], 0x20), worth[r], sum + r * PANEL);
    if (all) add_eight(_mm256_permute2x128_si256(total[r][0], total[r][1], 0x31), worth[r], sum + r * PANEL + 16);
  }
}

constexpr decltype(&score_code_rows<1>) score_code_some[] = {nullptr,            score_code_rows<1>, score_code_rows<2>,
                                                             score_code_rows<3>, score_code_rows<4>, score_code_rows<5>};
constexpr decltype(&add_code_rows<1>) add_code_some[] = {nullptr,          add_code_rows<1>, add_code_rows<2>,
                                                         add_code_rows<3>, add_code_rows<4>, add_code_rows<5>};

// Sixteen whole numbers as multiply_lines reads them.
INLINE void put_sixteen(__m256i first, __m256i second, int16_t* to) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
  _mm256_storeu_si256((__m256i*)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}

// A row's weights, times the scales of their values, as whole numbers; returns what 1 is worth.
INLINE float take_code_weights(const bf16* weight, const float* scale, int tiles, int16_t* to) {
  alignas(32) float w[WINDOW_CODES * TILE_TOKENS];
  f32v most = {};
  i32v finite = i32v{} - 1;
  for (int i = 0; i < tiles * TILE_TOKENS; i += LANES) {
    f32v x = load(weight + i) * load(scale + i);
    finite &= x <= splat(3.402823466e38f);
    most = maximum(most, x);
    store(w + i, x);
  }
  const bool all = _mm256_movemask_ps((__m256)finite) == 0xff;
  const float top = max_lanes(most), worth = top / WORD_MOST;
  const __m256 factor = _mm256_set1_ps(all && worth > 0 ? WORD_MOST / top : 0.0f);
  for (int i = 0; i < tiles * TILE_TOKENS; i += 16) {
    __m256i part[2];
    for (int v = 0; v < 2; v++)
      part[v] = all && worth > 0 ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(w + i + v * 8), factor)) : _mm256_setzero_si256();
    put_sixteen(part[0], part[1], to + i);
  }
  return all ? worth : NAN;
}

inline void to_codes_avx2(const bf16* q, int size, int row, const CodeQueries& to) {
  const float factor = whole_factor(q, size, to.scale + row);
  int16_t* out = reinterpret_cast<int16_t*>(to.word) + size_t(size) * row;
  for (int i = 0; i < size; i += 16) {
    __m256i narrow = factor > 0 ? load_raw<__m256i>(q + i) : _mm256_setzero_si256();
    put_sixteen(numbers_of(_mm256_castsi256_si128(narrow), factor), numbers_of(_mm256_extracti128_si256(narrow, 1), factor), out + i);
  }
}

void score_codes_avx2(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const CodeScales& scale,
                      float* score, size_t row, size_t step) {
  alignas(64) int16_t line[MOST_CODES * TILE_TOKENS];
  const int16_t* word = reinterpret_cast<const int16_t*>(q.word);
  for (int t = 0; t < tiles; t++) {
    widen_code_keys(code[t], stride, size, line);
    const int at = t * TILE_TOKENS;
    const CodeLines first{line, scale.count / 2, scale.first + at};
    const CodeLines others{line + scale.count * TILE_TOKENS, (size - scale.count) / 2, scale.others + at};
    float* to = score + t / 4 * step + t % 4 * TILE_TOKENS;
    in_word_groups(q.rows, PASS_CODES, [&](int r, int some) {
      const int16_t* from = word + size_t(size) * r;
      score_code_some[some](from, size, first, q.scale + r, false, to + r * row, row);
      if (others.lines) score_code_some[some](from + scale.count, size, others, q.scale + r, true, to + r * row, row);
    });
  }
}

void add_codes_avx2(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                    const float* scale, float* sum, size_t panel_step) {
  constexpr int window = WINDOW_CODES * TILE_TOKENS;
  alignas(64) int16_t line[2][window / 2 * LINE_WORDS], weight[NEAR_WEIGHTS][window];
  float worth[NEAR_WEIGHTS];
  for (int begin = 0; begin < rows; begin += NEAR_WEIGHTS, weights += NEAR_WEIGHTS * stride, sum += NEAR_WEIGHTS * PANEL) {
    const int some = std::min(rows - begin, NEAR_WEIGHTS);
    for (int r = 0; r < some; r++) worth[r] = take_code_weights(weights + r * stride, scale, tiles, weight[r]);
    for (int c = 0; c < size; c += 32) {
      const bool all = c + 32 <= size;
      for (int t = 0; t < tiles; t++)
        widen_code_values(code[t] + c, code_stride, all, line[0] + t * TILE_TOKENS / 2 * LINE_WORDS, window / 2 * LINE_WORDS);
      float* to = sum + c / PANEL * panel_step + c % PANEL;
      for (int run = 0; run < 2; run++)
        in_word_groups(some, PASS_CODES, [&](int r, int n) {
          add_code_some[n](weight[r], window, line[run], tiles * TILE_TOKENS / 2, worth + r, all, to + run * 8 + r * PANEL);
        });
    }
  }
}

}  // namespace
