// Products of rows in 8 bits with int4 weights, for AVX2 (words_avx2.h includes this). Every 32 inputs of a row have a scale of
// their own, as llama.cpp's Q8_0 has: codes are bytes after an instruction or two for 32 of them, and VPMADDUBSW multiplies
// those by a row's bytes (VPDPBUSD with AVX-VNNI). Sums of a block are exact, so both have the same bits.
//
// A row lies at data + 2 r * stride of a ByteRows: its bytes, in the order of a line's codes; then, of every block, what sums
// begin with (WHOLE_ONE's bits, less what codes lie above their numbers), for int4 and for e2m1, and its scale.
#pragma once

namespace {

constexpr int MOST_BYTE = 127;
constexpr float WHOLE_ONE = 12582912.0f;  // 1.5 x 2^23: to its bits a whole number is added as it is to the float
constexpr int CODE_OFFSET = 8;  // what a number of int4 is below its code; half as much again with e2m1
constexpr int INT4_ROWS = 8;    // their sums of a vector are half of the registers
constexpr int INT4_SLICE = 32;  // rows whose sums stay in the nearest cache

// One block: 32 bytes to `to`, their order in every eight 0 4 1 5 2 6 3 7. Returns their sum.
INLINE int block_to_bytes(__m256i first, __m256i second, float factor, int8_t* to) {
  auto sixteen_words = [&](__m256i narrow) {
    return _mm256_packs_epi32(numbers_of(_mm256_castsi256_si128(narrow), factor),
                              numbers_of(_mm256_extracti128_si256(narrow, 1), factor));
  };
  __m256i bytes = _mm256_packs_epi16(sixteen_words(first), sixteen_words(second));
  __m128i lower = _mm256_castsi256_si128(bytes), upper = _mm256_extracti128_si256(bytes, 1);
  _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi8(lower, upper));
  _mm_storeu_si128((__m128i*)to + 1, _mm_unpackhi_epi8(lower, upper));
  __m256i four = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
}

// Rows as products read them, `step` bytes apart. Each of the three arrays of numbers by block takes `blocks` bytes.
struct Int4Rows {
  const int8_t* data;
  const char* of_blocks;
  size_t step, blocks;

  Int4Rows(const ByteRows& a, int row, int count)
      : data(reinterpret_cast<const int8_t*>(a.data) + 2 * row * a.stride),
        of_blocks(reinterpret_cast<const char*>(data) + words_of_inputs(count * BLOCK)), step(2 * a.stride), blocks(count * 4) {}
};

template <class T>
INLINE T number_at(const char* at) {
  T number;
  memcpy(&number, at, sizeof(T));
  return number;
}

inline void row_to_int4_bytes(const bf16* x, int size, const ByteRows& to, int row) {
  const int blocks = (size + BLOCK - 1) / BLOCK;
  auto* bytes = reinterpret_cast<int8_t*>(to.data + 2 * row * to.stride);
  auto* offset = reinterpret_cast<int32_t*>(bytes + words_of_inputs(size));
  auto* scale = reinterpret_cast<float*>(offset + 2 * blocks);
  constexpr int32_t one = 0x4b400000;  // WHOLE_ONE's bits
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  for (int b = 0; b < blocks; b++, bytes += BLOCK) {
    __m256i first = sixteen(x + b * BLOCK, size - b * BLOCK), second = sixteen(x + b * BLOCK + 16, size - b * BLOCK - 16);
    __m256i most = _mm256_max_epu16(_mm256_and_si256(first, magnitude), _mm256_and_si256(second, magnitude));
    unsigned bits = most_of_sixteen(most) << 16;
    float top;
    memcpy(&top, &bits, 4);
    bool finite = bits < 0x7f800000u;
    scale[b] = finite ? top / MOST_BYTE : NAN;
    bool some = finite && top > WORD_LEAST_ROW;
    if (!some) first = second = _mm256_setzero_si256();
    int less = CODE_OFFSET * block_to_bytes(first, second, some ? MOST_BYTE / top : 0.0f, bytes);
    offset[b] = one - less, offset[blocks + b] = one - less - less / 2;
  }
}

INLINE __m256i four_bytes(const int8_t* x) {
  int four;
  memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// The lower halves of bytes as numbers from 0 on: plus CODE_OFFSET, with e2m1 half as much again.
template <bool E2M1>
INLINE __m256i bytes_of_codes(__m256i codes) {
  codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  if (!E2M1) return codes;
  __m128i numbers = _mm_add_epi8(_mm_loadu_si128((const __m128i*)E2M1_TWICE), _mm_set1_epi8(CODE_OFFSET * 3 / 2));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), codes);
}

// total + the products of eight codes of a column with a row's bytes.
INLINE __m256i plus_codes(__m256i total, const __m256i (&number)[2], const int8_t* x) {
#ifdef HAS_VNNI
  return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(total, number[0], four_bytes(x)), number[1], four_bytes(x + 4));
#endif
  __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(number[0], four_bytes(x)), _mm256_maddubs_epi16(number[1], four_bytes(x + 4)));
  return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Where a tile's whole sums go: times their group's scales to those of its rows.
struct ScaledSums {
  const char* scales;
  bool wide;
  float* sum;
  bool add;
};

// V vectors of a tile of block b: `at` the first one's lines, `column` its first column.
template <int R, int V, bool E2M1>
INLINE void int4_vectors(const Int4Rows& rows, int b, const char* at, const char* early, const ScaledSums& to, int column) {
  __m256i total[V][R];
  const char *offset = rows.of_blocks + b * 4 + (E2M1 ? rows.blocks : 0), *scale = rows.of_blocks + b * 4 + 2 * rows.blocks;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) total[v][r] = _mm256_set1_epi32(number_at<int>(offset + r * rows.step));
  }
  const int8_t* a = rows.data + b * BLOCK;
#pragma GCC unroll 1
  for (int line = 0; line < INT4_LINES; line++, at += 64, early += 64, a += 8) {
    _mm_prefetch(early, _MM_HINT_T0);
    __m256i number[V][2];
    for (int v = 0; v < V; v++) {
      __m256i codes = _mm256_loadu_si256((const __m256i*)(at + v * 32));
      number[v][0] = bytes_of_codes<E2M1>(codes), number[v][1] = bytes_of_codes<E2M1>(_mm256_srli_epi16(codes, 4));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) total[v][r] = plus_codes(total[v][r], number[v], a + r * rows.step);
  }
  for (int v = 0; v < V; v++) {
    const __m256 of_group = int4_scale(to.scales, to.wide, column + v * 8), one = _mm256_set1_ps(WHOLE_ONE);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      float* sum = to.sum + r * PANEL + column + v * 8;
      __m256 both = _mm256_mul_ps(of_group, _mm256_set1_ps(number_at<float>(scale + r * rows.step)));
      __m256 part = _mm256_sub_ps(_mm256_castsi256_ps(total[v][r]), one), so_far = to.add ? _mm256_loadu_ps(sum) : _mm256_setzero_ps();
      _mm256_storeu_ps(sum, _mm256_fmadd_ps(part, both, so_far));
    }
  }
}

// One tile. Few rows' sums of both vectors fit into registers beside what both read of rows.
template <int R, bool E2M1>
INLINE void int4_tile(const Int4Rows& rows, int b, const char* at, const char* early, const ScaledSums& to, int column) {
  constexpr int together = R <= 3 ? 2 : 1;
#pragma GCC unroll 1
  for (int v = 0; v < 2; v += together)
    int4_vectors<R, together, E2M1>(rows, b, at + v * 32, early + v * 32, to, column + v * 8);
}

// sum[R][64] += the products of blocks b .. end - 1, which are one group. Returns where the next group begins.
template <int R, bool E2M1>
NOINLINE const char* int4_bytes(const Int4Rows& rows, int b, int end, const char* at, bool wide, float* sum, const WordsAhead& ahead) {
  ScaledSums to{at, wide, sum, b > 0};
  at += PANEL * (wide ? 4 : 2);
  for (; b < end; b++, to.add = true)
    for (int t = 0; t < 4; t++, at += INT4_TILE) int4_tile<R, E2M1>(rows, b, at, ahead.of(at), to, t * 16);
  return at;
}

template <bool E2M1>
constexpr decltype(&int4_bytes<1, E2M1>) int4_bytes_of[] = {
    nullptr,             int4_bytes<1, E2M1>, int4_bytes<2, E2M1>, int4_bytes<3, E2M1>,        int4_bytes<4, E2M1>,
    int4_bytes<5, E2M1>, int4_bytes<6, E2M1>, int4_bytes<7, E2M1>, int4_bytes<INT4_ROWS, E2M1>};

void gemm_int4_bytes(const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next next) {
  auto& bytes = panel.e2m1 ? int4_bytes_of<true> : int4_bytes_of<false>;
  WordsAhead ahead{panel.data + Groups{panel.group * BLOCK, panel.wide}.panel_bytes(panel.blocks), next.data};
  for (int first = 0; first < rows; first += INT4_SLICE) {
    const char *at = panel.data, *then = at;
    for (int b = 0; b < panel.blocks; b += panel.group, at = then) {
      int end = panel.blocks - b < panel.group ? panel.blocks : b + panel.group;
      in_word_groups(rows - first < INT4_SLICE ? rows - first : INT4_SLICE, INT4_ROWS, [&](int r, int some) {
        then = bytes[some](Int4Rows(a, first + r, panel.blocks), b, end, at, panel.wide, sum + (first + r) * PANEL, ahead);
      });
    }
  }
}

}  // namespace
