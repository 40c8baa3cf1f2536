// Rows times int4 weights with VDPBF16PS: a word of four codes gives four lines of bf16 by shuffles, in registers.
#pragma once
#include "gemm_avx512bf16.h"
#include "int4_loops.h"

namespace {

constexpr int INT4_ONCE_ROWS = 5;    // in one pass over a panel; more rows take several of up to four, which is faster
constexpr int INT4_SLICE_ROWS = 32;  // whose sums stay in the nearest cache

// Two tiles at a time share what they read of rows. Each has two sums, of even and of odd lines, since a product waits for
// the one before it. Returns where the next group begins.
template <int R>
NOINLINE const char* group_of_rows(const bf16* a, size_t stride, const char* at, int blocks, const Int4Panel& panel,
                                   float* sum, bool add, const Int4Ahead& ahead) {
  const __m512i numbers = int4_numbers(panel.e2m1);
  const bool wide = panel.wide;
  const char* scales = at;
  at += PANEL * (wide ? 4 : 2);
  for (int b = 0; b < blocks; b++, a += BLOCK, at += INT4_BLOCK, add = true) {
    const char* early = ahead.of(at);
    for (int t = 0; t < 4; t += 2) {
      __m512 part[2][R][2];
#pragma GCC unroll 5
      for (int r = 0; r < R; r++)
        for (int i = 0; i < 2; i++) part[0][r][i] = part[1][r][i] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int line = 0; line < INT4_LINES; line++, early += 128) {
        __m512i codes[2];
        for (int i = 0; i < 2; i++) {
          codes[i] = _mm512_loadu_si512(at + (t + i) * INT4_TILE + line * 64);
          _mm_prefetch(early + i * 64, _MM_HINT_T1);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          __m512bh w[2];
          for (int i = 0; i < 2; i++) {
            w[i] = (__m512bh)_mm512_permutexvar_epi16(codes[i], numbers);
            codes[i] = _mm512_srli_epi16(codes[i], 4);
          }
#pragma GCC unroll 5
          for (int r = 0; r < R; r++) {
            __m512bh x = pair_at(a + r * stride + line * 8 + j * 2);
            for (int i = 0; i < 2; i++) part[j % 2][r][i] = _mm512_dpbf16_ps(part[j % 2][r][i], x, w[i]);
          }
        }
      }
      for (int i = 0; i < 2; i++) {
        __m512 scale = scales_at(scales, wide, t + i);
#pragma GCC unroll 5
        for (int r = 0; r < R; r++) {
          float* to = sum + r * PANEL + (t + i) * 16;
          __m512 both = _mm512_add_ps(part[0][r][i], part[1][r][i]);
          _mm512_storeu_ps(to, add ? _mm512_fmadd_ps(both, scale, _mm512_loadu_ps(to)) : _mm512_mul_ps(both, scale));
        }
      }
    }
  }
  return at;
}

constexpr decltype(&group_of_rows<1>) group_of[] = {nullptr,          group_of_rows<1>, group_of_rows<2>, group_of_rows<3>,
                                                    group_of_rows<4>, group_of_rows<5>};

bool int4_dp(const bf16* a, size_t stride, int rows, const Int4Panel& panel, float* sum, const char* after) {
  Int4Ahead ahead{panel.data + Groups{panel.group * BLOCK, panel.wide}.panel_bytes(panel.blocks), after};
  for (int first = 0; first < rows; first += INT4_SLICE_ROWS) {
    int slice = rows - first < INT4_SLICE_ROWS ? rows - first : INT4_SLICE_ROWS;
    const char *at = panel.data, *next = at;
    for (int b = 0; b < panel.blocks; b += panel.group, at = next) {
      int n = panel.blocks - b < panel.group ? panel.blocks - b : panel.group;
      in_groups(slice, slice <= INT4_ONCE_ROWS ? INT4_ONCE_ROWS : INT4_ONCE_ROWS - 1, [&](int r, int some) {
        r += first;
        next = group_of[some](a + r * stride + b * BLOCK, stride, at, n, panel, sum + r * PANEL, b > 0, ahead);
      });
    }
  }
  return true;
}

}  // namespace
