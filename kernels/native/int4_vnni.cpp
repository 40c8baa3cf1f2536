// Products with int4 weights for processors with AVX-512 VNNI: numbers are bytes from 0 on after an instruction or two,
// and VPDPBUSD multiplies them by a row's whole numbers of 16 bits, two bytes each. Sums of a block are exact; they become
// floats and are added in ascending order of blocks, times their group's scales.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#include <immintrin.h>

#include <algorithm>

#include "int4_loops.h"
#include "words_vnni.h"

namespace {

constexpr int CODE_OFFSET = 8;     // what a number is below its byte; half as much again with e2m1
constexpr int BYTES_AHEAD = 8192;  // that are asked for early: every line, or what is missed costs the time of the rest
constexpr int PASS_ROWS = 4;       // their sums are 16 of the 32 registers
constexpr int SLICE_ROWS = 32;     // whose sums stay in the nearest cache

// Of a row's block, CODE_OFFSET times the sum of its numbers: behind the row's high bytes.
INLINE const int32_t* corrections(const uint8_t* row, int blocks) {
  return reinterpret_cast<const int32_t*>(row + numbers_of(blocks * BLOCK));
}

// Bytes of the lower halves of `codes`.
template <bool E2M1>
INLINE __m512i bytes_of(__m512i codes) {
  codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
  if (!E2M1) return codes;
  __m128i numbers = _mm_add_epi8(_mm_loadu_si128((const __m128i*)E2M1_TWICE), _mm_set1_epi8(CODE_OFFSET * 3 / 2));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), codes);
}

template <int R>
struct Sums {
  __m512i high[R][2], low[R][2];
};

template <int R>
INLINE void add_codes(Sums<R>& sums, const __m512i (&codes)[2], const uint8_t* a, size_t stride) {
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    int high, low;
    memcpy(&high, a + 2 * r * stride, 4);
    memcpy(&low, a + (2 * r + 1) * stride, 4);
    __m512i x = _mm512_set1_epi32(high), y = _mm512_set1_epi32(low);
    for (int i = 0; i < 2; i++) {
      sums.high[r][i] = _mm512_dpbusd_epi32(sums.high[r][i], codes[i], x);
      sums.low[r][i] = _mm512_dpbusd_epi32(sums.low[r][i], codes[i], y);
    }
  }
}

// Two tiles at a time share what they read of rows. `block` is that of `at` in the row. Returns where the next group begins.
template <int R, bool E2M1>
NOINLINE const char* group_of_words(const uint8_t* row, size_t stride, int block, int all_blocks, const char* at, int blocks,
                                    bool wide, float* sum, const Int4Ahead& ahead) {
  const char *scales = at, *scales_ahead = ahead.of(at);
  at += PANEL * (wide ? 4 : 2);
  for (int i = 0; i < at - scales; i += 64) _mm_prefetch(scales_ahead + i, _MM_HINT_T1);
  for (int b = block; b < block + blocks; b++, at += INT4_BLOCK) {
    const char* early = ahead.of(at);
    const uint8_t* a = row + size_t(b) * BLOCK;
    for (int t = 0; t < 4; t += 2) {
      Sums<R> sums;
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        for (int i = 0; i < 2; i++) sums.high[r][i] = sums.low[r][i] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int line = 0; line < INT4_LINES; line++, early += 128) {
        __m512i lower[2], upper[2];
        for (int i = 0; i < 2; i++) {
          __m512i both = _mm512_loadu_si512(at + (t + i) * INT4_TILE + line * 64);
          _mm_prefetch(early + i * 64, _MM_HINT_T1);
          lower[i] = bytes_of<E2M1>(both);
          upper[i] = bytes_of<E2M1>(_mm512_srli_epi16(both, 4));
        }
        add_codes<R>(sums, lower, a + line * 8, stride);
        add_codes<R>(sums, upper, a + line * 8 + 4, stride);
      }
      for (int i = 0; i < 2; i++) {
        __m512 scale = scales_at(scales, wide, t + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(sums.high[r][i], 8), sums.low[r][i]);
          int correction = corrections(row + 2 * r * stride, all_blocks)[b];
          __m512i less = _mm512_set1_epi32(E2M1 ? correction + correction / 2 : correction);
          __m512 part = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, less));
          float* to = sum + r * PANEL + (t + i) * 16;
          _mm512_storeu_ps(to, b ? _mm512_fmadd_ps(part, scale, _mm512_loadu_ps(to)) : _mm512_mul_ps(part, scale));
        }
      }
    }
  }
  return at;
}

template <bool E2M1>
constexpr decltype(&group_of_words<1, E2M1>) group_of[] = {nullptr, group_of_words<1, E2M1>, group_of_words<2, E2M1>,
                                                           group_of_words<3, E2M1>, group_of_words<4, E2M1>};

}  // namespace

void to_words_vnni(const bf16* x, int size, const ByteRows& to, int row) {
  auto* correction = reinterpret_cast<int32_t*>(to.data + 2 * row * to.stride + numbers_of(size));
  row_to_words(x, size, to, row, [&](size_t i, int sum) {
    correction[i / BLOCK] = i % BLOCK ? correction[i / BLOCK] + CODE_OFFSET * sum : CODE_OFFSET * sum;
  });
}

void gemm_words_vnni(const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next next) {
  auto& group = panel.e2m1 ? group_of<true> : group_of<false>;
  Int4Ahead ahead{panel.data + Groups{panel.group * BLOCK, panel.wide}.panel_bytes(panel.blocks), next.data, BYTES_AHEAD};
  for (int first = 0; first < rows; first += SLICE_ROWS) {
    int slice = std::min(SLICE_ROWS, rows - first), passes = (slice + PASS_ROWS - 1) / PASS_ROWS;
    const char *at = panel.data, *after = at;
    for (int b = 0; b < panel.blocks; b += panel.group, at = after) {
      int blocks = std::min(panel.group, panel.blocks - b);
      for (int p = 0, r = 0; p < passes; p++) {
        int some = (slice - r) / (passes - p);
        after = group[some](a.from(first + r).data, a.stride, b, panel.blocks, at, blocks, panel.wide,
                               sum + (first + r) * PANEL, ahead);
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
