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

#include "ggml_avx512.h"
#include "int4_loops.h"

namespace {

constexpr int BYTES_AHEAD = 8192;  // that are asked for early
constexpr int PASS_ROWS = 4;       // their sums are 16 of the 32 registers
constexpr int SLICE_ROWS = 32;     // whose sums stay in the nearest cache

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

// sum (+)= what was multiplied so far of two tiles, times its scales.
template <int R, GgmlType TYPE>
INLINE void add_parts(const Sums<R>& sums, const WordRows& rows, int block, int half, const char* scales, int tile, float* sum,
                      bool add) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  for (int i = 0; i < 2; i++) {
    TileScales scale = scales_of<TYPE>(scales, block % shape.blocks(), half, tile + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      add_part<TYPE>(sums.high[r][i], sums.low[r][i], rows.sum<TYPE>(r, block, half), scale, sum + r * PANEL + (tile + i) * 16, add);
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
  scale_rows(sum, rows, a.scale);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
