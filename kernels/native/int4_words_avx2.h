// One tile of int4 weights times rows as whole numbers of 16 bits, for AVX2 (words_avx2.h includes this).
#pragma once

namespace {

constexpr int INT4_ROWS = WORD_ROWS;

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
INLINE void add_line(const char* at, const int16_t* a, size_t stride, __m256i (&total)[2][R]) {
  __m256i number[2][4];
  for (int v = 0; v < 2; v++) numbers_of_codes<E2M1>(_mm256_loadu_si256((const __m256i*)(at + v * 32)), number[v]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    for (int r = 0; r < R; r++) {
      __m256i x = word_pair(a + r * stride + j * 2);
      for (int v = 0; v < 2; v++) total[v][r] = plus_products(total[v][r], number[v][j], x);
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
                      const ScaledSums& to) {
  __m256i total[2][R];
  if constexpr (R == 1) {
    OneRow<E2M1> row(*offset);
#pragma GCC unroll 1  // GCC keeps nothing in registers where it unrolls all lines
    for (int line = 0; line < INT4_LINES; line++, at += 64, early += 64) {
      _mm_prefetch(early, _MM_HINT_T0);
      row.add_line(at, a + line * 8);
    }
    for (int v = 0; v < 2; v++) total[v][0] = row.sum(v);
  } else {
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 2; v++) total[v][r] = E2M1 ? _mm256_setzero_si256() : _mm256_set1_epi32(offset[r * (stride / 2)]);
#pragma GCC unroll 1
    for (int line = 0; line < INT4_LINES; line++, at += 64, early += 64) {
      _mm_prefetch(early, _MM_HINT_T0);
      add_line<R, E2M1>(at, a + line * 8, stride, total);
    }
  }
  for (int v = 0; v < 2; v++) to.put<R>(total[v], v * 8);
}

}  // namespace
