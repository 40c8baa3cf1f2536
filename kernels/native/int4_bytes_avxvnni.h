// One tile of int4 weights times rows as whole numbers of 16 bits, for AVX-VNNI (words_avx2.h includes this): VPDPBUSD
// multiplies codes as bytes, so a line is taken apart in half of the instructions, by a number's two bytes, whose sums are
// exact. The bits are those of words.
#pragma once

namespace {

constexpr int INT4_ROWS = 6;  // their sums of one vector are 12 of the 16 registers

// A row of row_to_int4_words for this: of every eight numbers the high bytes, in the order of a line's codes, and then the low ones.
void row_to_int4_bytes(const bf16* x, int size, const ByteRows& to, int row) {
  row_to_int4_words(x, size, to, row);
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 9, 3, 11, 5, 13, 7, 15, 0, 8, 2, 10, 4, 12, 6, 14));
  auto* at = reinterpret_cast<__m256i*>(to.data + 2 * row * to.stride);
  for (size_t i = 0; i < words_of_inputs(size); i += 16, at++)
    _mm256_storeu_si256(at, _mm256_shuffle_epi8(_mm256_loadu_si256(at), order));
}

INLINE __m256i four_bytes(const char* x) {
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

// The sums of V vectors of a tile's lines. `offset`: of each row, `stride` / 2 apart, what its sums begin with.
template <int R, int V, bool E2M1>
INLINE void add_vectors(const int16_t* a, size_t stride, const int32_t* offset, const char* at, const char* early,
                        const ScaledSums& to, int column) {
  const char* bytes = reinterpret_cast<const char*>(a);
  __m256i high[V][R], low[V][R];
  for (int v = 0; v < V; v++)
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) high[v][r] = low[v][r] = _mm256_setzero_si256();
#pragma GCC unroll 1
  for (int line = 0; line < INT4_LINES; line++, at += 64, early += 64, bytes += 16) {
    _mm_prefetch(early, _MM_HINT_T0);
    __m256i codes[V];
    for (int v = 0; v < V; v++) codes[v] = _mm256_loadu_si256((const __m256i*)(at + v * 32));
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m256i number[V];
      for (int v = 0; v < V; v++) number[v] = bytes_of_codes<E2M1>(half ? _mm256_srli_epi16(codes[v], 4) : codes[v]);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const char* eight = bytes + r * 2 * stride + half * 4;
        __m256i x = four_bytes(eight), y = four_bytes(eight + 8);
        for (int v = 0; v < V; v++) {
          high[v][r] = _mm256_dpbusd_avx_epi32(high[v][r], number[v], x);
          low[v][r] = _mm256_dpbusd_avx_epi32(low[v][r], y, number[v]);
        }
      }
    }
  }
  for (int v = 0; v < V; v++) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      int more = offset[r * (stride / 2)];
      low[v][r] = _mm256_add_epi32(low[v][r], _mm256_set1_epi32(E2M1 ? more + more / 2 : more));
      low[v][r] = _mm256_add_epi32(low[v][r], _mm256_slli_epi32(high[v][r], 8));
    }
    to.put<R>(low[v], column + v * 8);
  }
}

// As in int4_words_avx2.h. Few rows' sums of both vectors fit into registers, and then rows are read once for both.
template <int R, bool E2M1>
INLINE void int4_tile(const int16_t* a, size_t stride, const int32_t* offset, const char* at, const char* early,
                      const ScaledSums& to) {
  constexpr int together = R <= 3 ? 2 : 1;
#pragma GCC unroll 1
  for (int v = 0; v < 2; v += together)
    add_vectors<R, together, E2M1>(a, stride, offset, at + v * 32, early + v * 32, to, v * 8);
}

}  // namespace
