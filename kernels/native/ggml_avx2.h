// Products of rows as whole numbers of 16 bits with ggml's types (ggml.h), for AVX2, as words_avx2.h has those of int4: codes are
// widened to 16 bits in registers. Sums of 16 or 32 inputs are exact; they become floats and are added in ascending order,
// times their scales. What codes lie above their numbers, and minima, come off by the row's own sums.
#pragma once
#include "ggml.h"
#include "words_avx2.h"

namespace {

// Where a field is moved to become bits 4 and up.
template <int SHIFT>
INLINE __m256i moved(__m256i fields, int mask) {
  if constexpr (SHIFT > 0) fields = _mm256_slli_epi16(fields, SHIFT);
  if constexpr (SHIFT < 0) fields = _mm256_srli_epi16(fields, -SHIFT);
  return _mm256_and_si256(fields, _mm256_set1_epi8(char(mask)));
}

INLINE __m256i bytes_at(const char* at) { return _mm256_loadu_si256((const __m256i*)at); }

// Half of vectors 2 LINE and 2 LINE + 1 of a tile, as bytes; `tile` is where that half of its first vector is.
template <int BITS, int LINE>
INLINE void two_vectors(const char* tile, __m256i (&vectors)[2]) {
  if constexpr (BITS == 8) {
    vectors[0] = bytes_at(tile + LINE * 128), vectors[1] = bytes_at(tile + LINE * 128 + 64);
    return;
  }
  const __m256i low = _mm256_set1_epi8(15), both = bytes_at(tile + LINE * 64);
  vectors[0] = _mm256_and_si256(both, low), vectors[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
  if constexpr (BITS == 5) {
    __m256i fields = bytes_at(tile + 256);
    vectors[0] = _mm256_or_si256(vectors[0], moved<4 - 2 * LINE>(fields, 16));
    vectors[1] = _mm256_or_si256(vectors[1], moved<3 - 2 * LINE>(fields, 16));
  }
  if constexpr (BITS == 6) {
    __m256i fields = bytes_at(tile + 256 + LINE / 2 * 64);
    vectors[0] = _mm256_or_si256(vectors[0], moved<4 - LINE % 2 * 4>(fields, 48));
    vectors[1] = _mm256_or_si256(vectors[1], moved<2 - LINE % 2 * 4>(fields, 48));
  }
}

// A quarter of a tile: eight inputs, which are pairs 0 1, 4 5 of the first vector and 2 3, 6 7 of the second.
template <int R, int BITS, int LINE>
INLINE void add_codes(const char* tile, const int16_t* a, size_t stride, __m256i (&total)[R][2]) {
  __m256i vectors[2][2];
  for (int v = 0; v < 2; v++) two_vectors<BITS, LINE>(tile + v * 32, vectors[v]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m256i number[2];
    for (int v = 0; v < 2; v++) {
      __m256i bytes = vectors[v][j / 2];
      number[v] = j % 2 ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
    }
    for (int r = 0; r < R; r++) {
      __m256i x = word_pair(a + r * stride + LINE * 8 + j / 2 * 2 + j % 2 * 4);
      for (int v = 0; v < 2; v++) total[r][v] = plus_products(total[r][v], number[v], x);
    }
  }
}

struct EightScales {
  __m256 step, least;
};

INLINE __m256 halves_at(const char* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
INLINE __m256 bytes_as_floats(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }

// Of a block of a group and 8 columns.
template <GgmlType TYPE>
INLINE EightScales scales_of(const char* scales, int block, int half, int column) {
  __m256 step = halves_at(scales + column * 2);
  auto eight = [&](const char* kinds, int i) { return _mm_loadl_epi64((const __m128i*)(kinds + i * 64 + column)); };
  if constexpr (TYPE == GgmlType::q6_k) {
    __m256i bytes = _mm256_cvtepi8_epi32(eight(scales + 128, 2 * block + half));
    return {_mm256_mul_ps(step, _mm256_cvtepi32_ps(bytes)), step};
  }
  if constexpr (has_minima(TYPE)) {
    const __m128i six = _mm_set1_epi8(63), four = _mm_set1_epi8(15);
    auto at = [&](int i) { return eight(scales + 256, i); };
    auto top = [&](int i) { return _mm_and_si128(_mm_srli_epi16(at(i), 2), _mm_set1_epi8(48)); };
    __m128i scale, least;
    if (block < 4) {
      scale = _mm_and_si128(at(block), six), least = _mm_and_si128(at(block + 4), six);
    } else {
      __m128i both = at(block + 4);
      scale = _mm_or_si128(_mm_and_si128(both, four), top(block - 4));
      least = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(both, 4), four), top(block));
    }
    return {_mm256_mul_ps(step, bytes_as_floats(scale)), _mm256_mul_ps(halves_at(scales + 128 + column * 2), bytes_as_floats(least))};
  }
  return {step, step};
}

// Some rows of a product, and the sums of their sixteens, `stride` / 2 apart.
struct GgmlWords {
  const int16_t* data;
  size_t stride;
  const int32_t* sums;

  template <GgmlType TYPE>
  INLINE int sum(int row, int block, int half) const {
    const int32_t* sixteens = sums + row * (stride / 2) + 2 * block;
    return TYPE == GgmlType::q6_k ? sixteens[half] : sixteens[0] + sixteens[1];
  }
};

template <int R, GgmlType TYPE>
INLINE void add_parts(const __m256i (&total)[R][2], const GgmlWords& rows, int block, int half, const char* scales, int tile,
                      float* sum, bool add) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  for (int v = 0; v < 2; v++) {
    int column = tile * 16 + v * 8;
    EightScales scale = scales_of<TYPE>(scales, block % shape.blocks(), half, column);
    for (int r = 0; r < R; r++) {
      int own = rows.sum<TYPE>(r, block, half);
      __m256i whole = total[r][v];
      if (shape.offset) whole = _mm256_sub_epi32(whole, _mm256_set1_epi32(shape.offset * own));
      float* to = sum + r * PANEL + column;
      __m256 part = _mm256_cvtepi32_ps(whole), so_far = add ? _mm256_loadu_ps(to) : _mm256_setzero_ps();
      __m256 made = _mm256_fmadd_ps(part, scale.step, so_far);
      if (has_minima(TYPE)) made = _mm256_fnmadd_ps(_mm256_set1_ps(float(own)), scale.least, made);
      _mm256_storeu_ps(to, made);
    }
  }
}

// sum[R][64] += the products of blocks block .. end - 1. Returns where the next group begins.
template <int R, GgmlType TYPE>
NOINLINE const char* ggml_words(const GgmlWords& rows, int block, int end, const char* at, float* sum, const WordsAhead& ahead) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  constexpr int bits = shape.bits;
  const char* scales = at;
  for (; block < end; block++) {
    if (block % shape.blocks() == 0) {
      scales = at, at += shape.scale_bytes();
      const char* early = ahead.of(scales);
      for (int i = 0; i < shape.scale_bytes(); i += 64) _mm_prefetch(early + i, _MM_HINT_T0);
    }
    const int16_t* a = rows.data + size_t(block) * BLOCK;
    for (int t = 0; t < 4; t++, at += shape.tile_bytes()) {
      const char* early = ahead.of(at);
      for (int i = 0; i < shape.tile_bytes(); i += 64) _mm_prefetch(early + i, _MM_HINT_T0);
      __m256i total[R][2];
      for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm256_setzero_si256();
      add_codes<R, bits, 0>(at, a, rows.stride, total);
      add_codes<R, bits, 1>(at, a, rows.stride, total);
      if (TYPE == GgmlType::q6_k) {
        add_parts<R, TYPE>(total, rows, block, 0, scales, t, sum, block > 0);
        for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm256_setzero_si256();
      }
      add_codes<R, bits, 2>(at, a, rows.stride, total);
      add_codes<R, bits, 3>(at, a, rows.stride, total);
      bool half = TYPE == GgmlType::q6_k;
      add_parts<R, TYPE>(total, rows, block, half, scales, t, sum, block > 0 || half);
    }
  }
  return at;
}

using GgmlRows = decltype(&ggml_words<1, GgmlType::q4_0>);
template <GgmlType TYPE>
constexpr GgmlRows ggml_by_rows[] = {nullptr,             ggml_words<1, TYPE>, ggml_words<2, TYPE>,
                                     ggml_words<3, TYPE>, ggml_words<4, TYPE>, ggml_words<5, TYPE>};
constexpr const GgmlRows* ggml_by_type[GGML_TYPES] = {ggml_by_rows<GgmlType::q4_0>, ggml_by_rows<GgmlType::q5_0>,
                                                      ggml_by_rows<GgmlType::q8_0>, ggml_by_rows<GgmlType::q4_k>,
                                                      ggml_by_rows<GgmlType::q5_k>, ggml_by_rows<GgmlType::q6_k>};

void row_to_ggml_words(const bf16* x, int size, const ByteRows& to, int row) {
  row_to_words<false>(x, size, to, row);
  auto* words = reinterpret_cast<int16_t*>(to.data + 2 * row * to.stride);
  auto* sums = reinterpret_cast<int32_t*>(words + words_of_inputs(size));
  for (int i = 0; i * GGML_SUMS < int(words_of_inputs(size)); i++) sums[i] = sum_of_sixteen(words + i * GGML_SUMS);
}

void gemm_ggml_words(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next next) {
  constexpr int step = GGML_STRETCH / BLOCK;
  const int inputs = panel.blocks * BLOCK;
  const char *at = panel.data, *then = at;
  WordsAhead ahead{at + ggml_shape(panel.type).panel_bytes(inputs), next.data};
  for (int b = 0; b < panel.blocks; b += step, at = then) {
    int end = panel.blocks - b < step ? panel.blocks : b + step;
    in_word_groups(rows, WORD_ROWS, [&](int r, int some) {
      const int16_t* row = words_of(a, r);
      GgmlWords given{row, a.stride, reinterpret_cast<const int32_t*>(row + words_of_inputs(inputs))};
      then = ggml_by_type[int(panel.type)][some](given, b, end, at, sum + r * PANEL, ahead);
    });
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) store(sum + r * PANEL + c, load(sum + r * PANEL + c) * a.scale[r]);
}

}  // namespace
