// Products with ggml's types (ggml.h) for processors with AVX-512 VNNI: codes are bytes from 0 on, and VPDPBUSD multiplies them
// by a row's whole numbers of 16 bits, two bytes each. Sums of 16 or 32 inputs are exact; they become floats and are added in
// ascending order, times their scales. What codes lie above their numbers, and minima, come off by the row's own sums.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#include <immintrin.h>

#include <algorithm>

#include "ggml.h"
#include "int4_loops.h"
#include "words_vnni.h"

namespace {

constexpr int BYTES_AHEAD = 8192;  // that are asked for early
constexpr int PASS_ROWS = 4;       // their sums are 16 of the 32 registers
constexpr int SLICE_ROWS = 32;     // whose sums stay in the nearest cache

// Where the field of vector V is that becomes bits 4 and up.
template <int SHIFT>
INLINE __m512i moved(__m512i fields, int mask) {
  if constexpr (SHIFT > 0) fields = _mm512_slli_epi16(fields, SHIFT);
  if constexpr (SHIFT < 0) fields = _mm512_srli_epi16(fields, -SHIFT);
  return _mm512_and_si512(fields, _mm512_set1_epi8(char(mask)));
}

// Vectors 2 LINE and 2 LINE + 1 of a tile, as bytes.
template <int BITS, int LINE>
INLINE void two_vectors(const char* tile, __m512i& first, __m512i& second) {
  if constexpr (BITS == 8) {
    first = _mm512_loadu_si512(tile + LINE * 128), second = _mm512_loadu_si512(tile + LINE * 128 + 64);
    return;
  }
  const __m512i low = _mm512_set1_epi8(15), both = _mm512_loadu_si512(tile + LINE * 64);
  first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  if constexpr (BITS == 5) {
    __m512i fields = _mm512_loadu_si512(tile + 256);
    first = _mm512_or_si512(first, moved<4 - 2 * LINE>(fields, 16));
    second = _mm512_or_si512(second, moved<3 - 2 * LINE>(fields, 16));
  }
  if constexpr (BITS == 6) {
    __m512i fields = _mm512_loadu_si512(tile + 256 + LINE / 2 * 64);
    first = _mm512_or_si512(first, moved<4 - LINE % 2 * 4>(fields, 48));
    second = _mm512_or_si512(second, moved<2 - LINE % 2 * 4>(fields, 48));
  }
}

INLINE __m512 halves_at(const char* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
INLINE __m512 bytes_as_floats(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

struct TileScales {
  __m512 step, least;
};

// Of a block of a group and 16 columns.
template <GgmlType TYPE>
INLINE TileScales scales_of(const char* scales, int block, int half, int tile) {
  __m512 step = halves_at(scales + tile * 32);
  if constexpr (TYPE == GgmlType::q6_k) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)(scales + 128 + (2 * block + half) * 64 + tile * 16));
    return {_mm512_mul_ps(step, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))), step};
  }
  if constexpr (has_minima(TYPE)) {
    const __m128i six = _mm_set1_epi8(63), four = _mm_set1_epi8(15);
    auto at = [&](int i) { return _mm_loadu_si128((const __m128i*)(scales + 256 + i * 64 + tile * 16)); };
    auto top = [&](int i) { return _mm_and_si128(_mm_srli_epi16(at(i), 2), _mm_set1_epi8(48)); };
    __m128i scale, least;
    if (block < 4) {
      scale = _mm_and_si128(at(block), six), least = _mm_and_si128(at(block + 4), six);
    } else {
      __m128i both = at(block + 4);
      scale = _mm_or_si128(_mm_and_si128(both, four), top(block - 4));
      least = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(both, 4), four), top(block));
    }
    return {_mm512_mul_ps(step, bytes_as_floats(scale)), _mm512_mul_ps(halves_at(scales + 128 + tile * 32), bytes_as_floats(least))};
  }
  return {step, step};
}

template <int R>
struct Sums {
  __m512i high[R][2], low[R][2];
  INLINE void clear() {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 2; i++) high[r][i] = low[r][i] = _mm512_setzero_si512();
  }
  INLINE void add(const __m512i (&codes)[2], const uint8_t* a, size_t stride) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      int upper, lower;
      memcpy(&upper, a + 2 * r * stride, 4);
      memcpy(&lower, a + (2 * r + 1) * stride, 4);
      __m512i x = _mm512_set1_epi32(upper), y = _mm512_set1_epi32(lower);
      for (int i = 0; i < 2; i++) {
        high[r][i] = _mm512_dpbusd_epi32(high[r][i], codes[i], x);
        low[r][i] = _mm512_dpbusd_epi32(low[r][i], codes[i], y);
      }
    }
  }
};

// Some rows of a product: their bytes, and where sums of sixteens begin behind the high ones.
struct WordRows {
  const uint8_t* data;
  size_t stride, sums;

  INLINE const uint8_t* at(int block) const { return data + size_t(block) * BLOCK; }
  // Of the block, or of half of it.
  template <GgmlType TYPE>
  INLINE int sum(int row, int block, int half) const {
    auto* sixteens = reinterpret_cast<const int32_t*>(data + 2 * row * stride + sums) + 2 * block;
    return TYPE == GgmlType::q6_k ? sixteens[half] : sixteens[0] + sixteens[1];
  }
};

// sum (+)= what was multiplied so far of two tiles, times its scales.
template <int R, GgmlType TYPE>
INLINE void add_parts(const Sums<R>& sums, const WordRows& rows, int block, int half, const char* scales, int tile, float* sum,
                      bool add) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  for (int i = 0; i < 2; i++) {
    TileScales scale = scales_of<TYPE>(scales, block % shape.blocks(), half, tile + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      int own = rows.sum<TYPE>(r, block, half);
      __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(sums.high[r][i], 8), sums.low[r][i]);
      if (shape.offset) whole = _mm512_sub_epi32(whole, _mm512_set1_epi32(shape.offset * own));
      float* to = sum + r * PANEL + (tile + i) * 16;
      __m512 part = _mm512_cvtepi32_ps(whole);
      __m512 total = add ? _mm512_fmadd_ps(part, scale.step, _mm512_loadu_ps(to)) : _mm512_mul_ps(part, scale.step);
      if (has_minima(TYPE)) total = _mm512_fnmadd_ps(_mm512_set1_ps(float(own)), scale.least, total);
      _mm512_storeu_ps(to, total);
    }
  }
}

// A quarter of two tiles of a block.
template <int R, GgmlType TYPE, int LINE>
INLINE void add_line(Sums<R>& sums, const WordRows& rows, int block, const char* tile, const char* early) {
  constexpr int bytes = ggml_shape(TYPE).tile_bytes(), lines = bytes / 32;
  for (int l = LINE * lines / 4; l < (LINE + 1) * lines / 4; l++) _mm_prefetch(early + l * 64, _MM_HINT_T1);
  __m512i first[2], second[2];
  for (int i = 0; i < 2; i++) two_vectors<ggml_shape(TYPE).bits, LINE>(tile + i * bytes, first[i], second[i]);
  sums.add(first, rows.at(block) + LINE * 8, rows.stride);
  sums.add(second, rows.at(block) + LINE * 8 + 4, rows.stride);
}

// Two tiles at a time share what they read of rows. Returns where the next group begins.
template <int R, GgmlType TYPE>
NOINLINE const char* stretch(const WordRows& rows, int block, int end, const char* at, float* sum, const Int4Ahead& ahead) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  const char* scales = at;
  for (; block < end; block++, at += shape.block_bytes()) {
    if (block % shape.blocks() == 0) {
      scales = at, at += shape.scale_bytes();
      const char* early = ahead.of(scales);
      for (int i = 0; i < shape.scale_bytes(); i += 64) _mm_prefetch(early + i, _MM_HINT_T1);
    }
    const char* early = ahead.of(at);
    for (int t = 0; t < 4; t += 2, early += 2 * shape.tile_bytes()) {
      const char* tile = at + t * shape.tile_bytes();
      Sums<R> sums;
      sums.clear();
      add_line<R, TYPE, 0>(sums, rows, block, tile, early);
      add_line<R, TYPE, 1>(sums, rows, block, tile, early);
      if (TYPE == GgmlType::q6_k) {
        add_parts<R, TYPE>(sums, rows, block, 0, scales, t, sum, block > 0);
        sums.clear();
      }
      add_line<R, TYPE, 2>(sums, rows, block, tile, early);
      add_line<R, TYPE, 3>(sums, rows, block, tile, early);
      bool half = TYPE == GgmlType::q6_k;
      add_parts<R, TYPE>(sums, rows, block, half, scales, t, sum, block > 0 || half);
    }
  }
  return at;
}

using Stretch = decltype(&stretch<1, GgmlType::q4_0>);
template <GgmlType TYPE>
constexpr Stretch by_rows[] = {nullptr, stretch<1, TYPE>, stretch<2, TYPE>, stretch<3, TYPE>, stretch<4, TYPE>};
constexpr const Stretch* by_type[GGML_TYPES] = {by_rows<GgmlType::q4_0>, by_rows<GgmlType::q5_0>, by_rows<GgmlType::q8_0>,
                                                by_rows<GgmlType::q4_k>, by_rows<GgmlType::q5_k>, by_rows<GgmlType::q6_k>};

}  // namespace

void to_ggml_vnni(const bf16* x, int size, const ByteRows& to, int row) {
  auto* sums = reinterpret_cast<int32_t*>(to.data + 2 * row * to.stride + numbers_of(size));
  row_to_words(x, size, to, row, [&](size_t i, int sum) { sums[i / GGML_SUMS] = sum; });
}

void gemm_ggml_vnni(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next next) {
  constexpr int step = GGML_STRETCH / BLOCK;
  const int inputs = panel.blocks * BLOCK;
  Int4Ahead ahead{panel.data + ggml_shape(panel.type).panel_bytes(inputs), next.data, BYTES_AHEAD};
  for (int first = 0; first < rows; first += SLICE_ROWS) {
    int slice = std::min(SLICE_ROWS, rows - first), passes = (slice + PASS_ROWS - 1) / PASS_ROWS;
    const char *at = panel.data, *after = at;
    for (int b = 0; b < panel.blocks; b += step, at = after) {
      int end = std::min(panel.blocks, b + step);
      for (int p = 0, r = 0; p < passes; p++) {
        int some = (slice - r) / (passes - p);
        WordRows given{a.from(first + r).data, a.stride, numbers_of(inputs)};
        after = by_type[int(panel.type)][some](given, b, end, at, sum + (first + r) * PANEL, ahead);
        r += some;
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += 16) {
      float* to = sum + r * PANEL + c;
      _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_loadu_ps(to), _mm512_set1_ps(a.scale[r])));
    }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
