// Products of rows as whole numbers of 16 bits with int8 and int4 weights, for AVX2: VPMADDWD multiplies pairs of 16 bits,
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
constexpr int CODE_OFFSET = 8;            // what a number of int4 is below its code
constexpr int WORD_AHEAD = 2048;          // bytes that are asked for early
constexpr int WORD_CHUNK = 8192;          // bytes of weights that several groups of rows take in turn

INLINE __m256i sixteen(const bf16* x, int left) {
  if (left >= 16) return _mm256_loadu_si256((const __m256i*)x);
  bf16 some[16] = {};
  if (left > 0) memcpy(some, x, left * sizeof(bf16));
  return _mm256_loadu_si256((const __m256i*)some);
}

// The largest magnitude of a row as the bits of a bf16, which order as whole numbers do.
INLINE unsigned most_word(const bf16* x, int size) {
  __m256i most = _mm256_setzero_si256();
  for (int i = 0; i < size; i += 16)
    most = _mm256_max_epu16(most, _mm256_and_si256(sixteen(x + i, size - i), _mm256_set1_epi16(0x7fff)));
  __m128i half = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  __m128i inverted = _mm_xor_si128(half, _mm_set1_epi16(-1));  // the least of these is the instruction there is
  return 0xffffu ^ unsigned(_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

INLINE __m256i numbers_of(__m128i eight, float inverse) {
  __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(wide), _mm256_set1_ps(inverse)));
}

INLINE size_t words_of_inputs(int inputs) { return size_t(int8_blocks(inputs)) * INT8_INPUTS; }

INLINE int sum_of_sixteen(const int16_t* words) {
  __m256i sums = _mm256_madd_epi16(_mm256_loadu_si256((const __m256i*)words), _mm256_set1_epi16(1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// What sums of a row's blocks begin with: codes of int4 lie plus CODE_OFFSET. Behind the row's numbers.
INLINE void put_offsets(int16_t* row, int size) {
  int32_t* offset = reinterpret_cast<int32_t*>(row + words_of_inputs(size));
  for (int b = 0; b * BLOCK < size; b++)
    offset[b] = -CODE_OFFSET * (sum_of_sixteen(row + b * BLOCK) + sum_of_sixteen(row + b * BLOCK + 16));
}

// `swapped`: of every four numbers the second and the third change places, which int8 weights ask for.
template <bool SWAPPED>
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
    if (SWAPPED) words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i*)(out + i), words);
  }
}

void row_to_int4_words(const bf16* x, int size, const ByteRows& to, int row) {
  row_to_words<false>(x, size, to, row);
  put_offsets(reinterpret_cast<int16_t*>(to.data + 2 * row * to.stride), size);
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

INLINE __m256 int4_scale(const char* scales, bool wide, int column) {
  if (wide) return _mm256_loadu_ps((const float*)scales + column);
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(scales + column * 2)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

// Numbers of the four codes of sixteen words: plus CODE_OFFSET, if not of e2m1.
template <bool E2M1>
INLINE void numbers_of_codes(__m256i codes, __m256i (&number)[4]) {
  if (!E2M1) {
    const __m256i lowest = _mm256_set1_epi16(15);
    for (int j = 0; j < 3; j++) number[j] = _mm256_and_si256(j ? _mm256_srli_epi16(codes, 4 * j) : codes, lowest);
    number[3] = _mm256_srli_epi16(codes, 12);
    return;
  }
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)E2M1_TWICE)), low = _mm256_set1_epi8(15);
  for (int i = 0; i < 2; i++) {  // bytes of codes i and 2 + i
    __m256i bytes = _mm256_shuffle_epi8(table, _mm256_and_si256(i ? _mm256_srli_epi16(codes, 4) : codes, low));
    number[i] = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    number[2 + i] = _mm256_srai_epi16(bytes, 8);
  }
}

// The products of a line's words with R rows.
template <int R, bool E2M1>
INLINE void add_line(const char* at, const int16_t* a, size_t stride, __m256i (&total)[R][2]) {
  __m256i number[2][4];
  for (int v = 0; v < 2; v++) numbers_of_codes<E2M1>(_mm256_loadu_si256((const __m256i*)(at + v * 32)), number[v]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    for (int r = 0; r < R; r++) {
      __m256i x = word_pair(a + r * stride + j * 2);
      for (int v = 0; v < 2; v++) total[r][v] = plus_products(total[r][v], number[v][j], x);
    }
}

// One row's sums. Codes 1 and 2 are multiplied where they stand, 4 and 8 bits up, and have sums of their own.
template <bool E2M1>
struct OneRow {
  __m256i plain[2], up4[2], up8[2];

  INLINE explicit OneRow(int32_t offset) {
    for (int v = 0; v < 2; v++) plain[v] = _mm256_set1_epi32(offset), up4[v] = up8[v] = _mm256_setzero_si256();
  }
  INLINE void add_line(const char* at, const int16_t* a) {
    __m256i x[4];
    for (int j = 0; j < 4; j++) x[j] = word_pair(a + j * 2);
    for (int v = 0; v < 2; v++) {
      __m256i codes = _mm256_loadu_si256((const __m256i*)(at + v * 32));
      plain[v] = plus_products(plain[v], _mm256_and_si256(codes, _mm256_set1_epi16(0x000f)), x[0]);
      up4[v] = plus_products(up4[v], _mm256_and_si256(codes, _mm256_set1_epi16(0x00f0)), x[1]);
      up8[v] = plus_products(up8[v], _mm256_and_si256(codes, _mm256_set1_epi16(0x0f00)), x[2]);
      plain[v] = plus_products(plain[v], _mm256_srli_epi16(codes, 12), x[3]);
    }
  }
  INLINE __m256i sum(int v) const {
    __m256i up = _mm256_add_epi32(up4[v], _mm256_srai_epi32(up8[v], 4));
    return _mm256_add_epi32(plain[v], _mm256_srai_epi32(up, 4));
  }
};

// Numbers of e2m1 are multiplied 8 bits up, where a byte of a word needs one instruction. 16 products of 12 x 256 and 32,767
// are less than 2^31.
template <>
struct OneRow<true> {
  __m256i low[2], high[2];

  INLINE explicit OneRow(int32_t) {
    for (int v = 0; v < 2; v++) low[v] = high[v] = _mm256_setzero_si256();
  }
  INLINE void add_line(const char* at, const int16_t* a) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)E2M1_TWICE));
    const __m256i code = _mm256_set1_epi8(15), upper = _mm256_set1_epi16(short(0xff00));
    for (int v = 0; v < 2; v++) {
      __m256i codes = _mm256_loadu_si256((const __m256i*)(at + v * 32));
      for (int i = 0; i < 2; i++) {  // bytes of codes i and 2 + i
        __m256i bytes = _mm256_shuffle_epi8(table, _mm256_and_si256(i ? _mm256_srli_epi16(codes, 4) : codes, code));
        low[v] = plus_products(low[v], _mm256_slli_epi16(bytes, 8), word_pair(a + i * 2));
        high[v] = plus_products(high[v], _mm256_and_si256(bytes, upper), word_pair(a + (2 + i) * 2));
      }
    }
  }
  INLINE __m256i sum(int v) const {
    return _mm256_add_epi32(_mm256_srai_epi32(low[v], 8), _mm256_srai_epi32(high[v], 8));
  }
};

// The sums of one tile of a block: words of its lines have four codes, inputs w % 2, 2 + w % 2, .. of column w / 2. `offset`:
// of each row, `stride` / 2 apart, what its sums begin with.
template <int R, bool E2M1>
INLINE void int4_tile(const int16_t* a, size_t stride, const int32_t* offset, const char* at, const char* early,
                      __m256i (&total)[R][2]) {
  if constexpr (R == 1) {
    OneRow<E2M1> row(*offset);
#pragma GCC unroll 1  // GCC keeps nothing in registers where it unrolls all lines
    for (int line = 0; line < INT4_LINES; line++, at += 64, early += 64) {
      _mm_prefetch(early, _MM_HINT_T0);
      row.add_line(at, a + line * 8);
    }
    for (int v = 0; v < 2; v++) total[0][v] = row.sum(v);
    return;
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) total[r][v] = E2M1 ? _mm256_setzero_si256() : _mm256_set1_epi32(offset[r * (stride / 2)]);
#pragma GCC unroll 1
  for (int line = 0; line < INT4_LINES; line++, at += 64, early += 64) {
    _mm_prefetch(early, _MM_HINT_T0);
    add_line<R, E2M1>(at, a + line * 8, stride, total);
  }
}

// sum[R][64] += the products of one group times its scales. Returns where the next group begins.
template <int R, bool E2M1>
NOINLINE const char* int4_words(const int16_t* a, size_t stride, const int32_t* offset, const char* at, int blocks, bool wide,
                                float* sum, bool add, const WordsAhead& ahead) {
  const char* scales = at;
  at += PANEL * (wide ? 4 : 2);
  for (int b = 0; b < blocks; b++, a += BLOCK, offset++, add = true) {
    for (int t = 0; t < 4; t++, at += INT4_TILE) {
      __m256i total[R][2];
      int4_tile<R, E2M1>(a, stride, offset, at, ahead.of(at), total);
      for (int v = 0; v < 2; v++) {
        __m256 scale = int4_scale(scales, wide, t * 16 + v * 8);
        for (int r = 0; r < R; r++) {
          float* to = sum + r * PANEL + t * 16 + v * 8;
          __m256 so_far = add ? _mm256_loadu_ps(to) : _mm256_setzero_ps();
          _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[r][v]), scale, so_far));
        }
      }
    }
  }
  return at;
}

constexpr decltype(&int8_words<1>) int8_words_of[] = {nullptr,       int8_words<1>, int8_words<2>,
                                                      int8_words<3>, int8_words<4>, int8_words<5>};
template <bool E2M1>
constexpr decltype(&int4_words<1, E2M1>) int4_words_of[] = {
    nullptr, int4_words<1, E2M1>, int4_words<2, E2M1>, int4_words<3, E2M1>, int4_words<4, E2M1>, int4_words<5, E2M1>};

// Calls work(first row, rows) for all rows, in as few groups as there are and all alike.
template <class Work>
INLINE void in_word_groups(int rows, const Work& work) {
  int groups = (rows + WORD_ROWS - 1) / WORD_ROWS;
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
    in_word_groups(rows, [&](int r, int some) {
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

void gemm_int4_words(const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next next) {
  const char *at = panel.data, *then = at;
  Groups groups{panel.group * BLOCK, panel.wide};
  const size_t numbers = words_of_inputs(panel.blocks * BLOCK);
  auto& words = panel.e2m1 ? int4_words_of<true> : int4_words_of<false>;
  WordsAhead ahead{at + groups.panel_bytes(panel.blocks), next.data};
  for (int b = 0; b < panel.blocks; b += panel.group, at = then) {
    int n = panel.blocks - b < panel.group ? panel.blocks - b : panel.group;
    in_word_groups(rows, [&](int r, int some) {
      const int16_t* row = words_of(a, r);
      const int32_t* offset = reinterpret_cast<const int32_t*>(row + numbers) + b;
      then = words[some](row + b * BLOCK, a.stride, offset, at, n, panel.wide, sum + r * PANEL, b > 0, ahead);
    });
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) store(sum + r * PANEL + c, load(sum + r * PANEL + c) * a.scale[r]);
}

}  // namespace
