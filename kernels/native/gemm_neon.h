// Products of bf16 rows with bf16 panels for Arm's vectors of 16 bytes. Every output has one sum, to which inputs are added
// in ascending order.
//
// HAS_BF16: BFDOT adds the products of a word's two inputs, so a line of a panel is multiplied as it lies; many rows take
// BFMMLA, which Arm defines as two BFDOTs, the bits included. Without: a word shifted is its first input as a float, masked
// its second, and rows become floats once for all columns.
#pragma once
#include <arm_neon.h>

#include <algorithm>

#include "isa.h"
#include "vec.h"

namespace {

constexpr int ROW_BLOCKS = 4;  // inputs of a pass, in blocks: 16 KiB of weights
constexpr int WIDE_ROW = ROW_BLOCKS * BLOCK;
constexpr int FEW_ROWS = 4;    // of a pass; their sums are up to 16 of the 32 registers

// Sixteen columns of a line.
INLINE void load_line(const bf16* words, uint16x8_t (&line)[4]) {
  uint16x8x4_t all = vld1q_u16_x4(&words->bits);
  for (int v = 0; v < 4; v++) line[v] = all.val[v];
}

#ifdef HAS_BF16
using Input = bfloat16x8_t;  // four words of a row
constexpr int INPUT_LINES = 4;

INLINE Input load_input(const bf16* x) { return vreinterpretq_bf16_u16(vld1q_u16(&x->bits)); }

// Four columns of line L, times R rows.
template <int L, int R>
INLINE void add_words(uint16x8_t words, const Input (&x)[R], float32x4_t* total, int step) {
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    float32x4_t& sum = total[r * step];
    sum = vbfdotq_laneq_f32(sum, vreinterpretq_bf16_u16(words), x[r], L);
  }
}
#else
using Input = float32x4_t;  // two words, widened
constexpr int INPUT_LINES = 2;

INLINE Input load_input(const float* x) { return vld1q_f32(x); }

template <int L, int R>
INLINE void add_words(uint16x8_t words, const Input (&x)[R], float32x4_t* total, int step) {
  uint32x4_t pair = vreinterpretq_u32_u16(words);
  float32x4_t first = vreinterpretq_f32_u32(vshlq_n_u32(pair, 16));
  float32x4_t second = vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xffff0000u)));
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    float32x4_t& sum = total[r * step];
    sum = vfmaq_laneq_f32(vfmaq_laneq_f32(sum, first, x[r], 2 * L), second, x[r], 2 * L + 1);
  }
}
#endif

// Line L of T neighbouring tiles.
template <int L, int R, int T>
INLINE void add_panel_line(const bf16* lines, const Input (&x)[R], float32x4_t (&total)[R][4 * T]) {
#pragma GCC unroll 2
  for (int t = 0; t < T; t++) {
    uint16x8_t line[4];
    load_line(lines + t * TILE + L * 32, line);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) add_words<L, R>(line[v], x, &total[0][4 * t + v], 4 * T);
  }
}

template <int R, int T, class X>
INLINE void tiles_by_rows(const X* x, size_t stride, const bf16* tile, int blocks, float* sum, bool add) {
  float32x4_t total[R][4 * T];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 4 * T; v++) total[r][v] = add ? vld1q_f32(sum + r * PANEL + v * 4) : vdupq_n_f32(0);
  for (int b = 0; b < blocks; b++, tile += PANEL_BLOCK) {
    const bf16* lines = tile;
    for (int k = 0; k < BLOCK; k += 2 * INPUT_LINES, lines += 32 * INPUT_LINES, x += 2 * INPUT_LINES) {
      Input number[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) number[r] = load_input(x + r * stride);
      add_panel_line<0, R, T>(lines, number, total);
      add_panel_line<1, R, T>(lines, number, total);
#ifdef HAS_BF16
      add_panel_line<2, R, T>(lines, number, total);
      add_panel_line<3, R, T>(lines, number, total);
#endif
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 4 * T; v++) vst1q_f32(sum + r * PANEL + v * 4, total[r][v]);
}

template <int R, class X>
NOINLINE void panel_by_rows(const X* x, size_t stride, const bf16* panel, int blocks, float* sum, bool add) {
  constexpr int together = R < 3 ? 2 : 1;
  for (int t = 0; t < 4; t += together)
    tiles_by_rows<R, together>(x, stride, panel + t * TILE, blocks, sum + t * 16, add);
}

template <class X>
constexpr decltype(&panel_by_rows<1, X>) panel_by_some[] = {nullptr, panel_by_rows<1, X>, panel_by_rows<2, X>,
                                                            panel_by_rows<3, X>, panel_by_rows<4, X>};

#ifdef HAS_BF16
constexpr int MOST_PAIRS = 4;  // of rows of a pass: with eight columns their sums are half of the registers

// Four inputs of two rows side by side, what BFMMLA multiplies: `pairs` of rows, WIDE_ROW * 2 elements each.
INLINE void pair_rows(const bf16* a, size_t stride, int pairs, int inputs, bf16* x) {
  for (int p = 0; p < pairs; p++, a += 2 * stride, x += 2 * WIDE_ROW)
    for (int k = 0; k < inputs; k += 4) {
      memcpy(x + 2 * k, a + k, 8);
      memcpy(x + 2 * k + 4, a + stride + k, 8);
    }
}

// Eight columns of a tile for P pairs of rows.
template <int P>
INLINE void columns_by_pairs(const bf16* x, const bf16* tile, int blocks, float* sum, bool add) {
  float32x4_t total[P][4];
#pragma GCC unroll 4
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      const float* at = sum + 2 * p * PANEL + 2 * c;
      total[p][c] = add ? vcombine_f32(vld1_f32(at), vld1_f32(at + PANEL)) : vdupq_n_f32(0);
    }
  for (int b = 0; b < blocks; b++, tile += PANEL_BLOCK) {
    const bf16* lines = tile;
    for (int k = 0; k < BLOCK; k += 4, lines += 64, x += 8) {
      Input number[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) number[p] = load_input(x + p * 2 * WIDE_ROW);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        uint32x4_t even = vreinterpretq_u32_u16(vld1q_u16(&lines[v * 8].bits));
        uint32x4_t odd = vreinterpretq_u32_u16(vld1q_u16(&lines[v * 8 + 32].bits));
        Input w[] = {vreinterpretq_bf16_u32(vzip1q_u32(even, odd)), vreinterpretq_bf16_u32(vzip2q_u32(even, odd))};
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++)
#pragma GCC unroll 4
          for (int p = 0; p < P; p++) total[p][2 * v + c] = vbfmmlaq_f32(total[p][2 * v + c], number[p], w[c]);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      float* to = sum + 2 * p * PANEL + 2 * c;
      vst1_f32(to, vget_low_f32(total[p][c]));
      vst1_f32(to + PANEL, vget_high_f32(total[p][c]));
    }
}

template <int P>
NOINLINE void panel_by_pairs(const bf16* x, const bf16* panel, int blocks, float* sum, bool add) {
  for (int c = 0; c < PANEL; c += 8) columns_by_pairs<P>(x, panel + c / 16 * TILE + c % 16 * 2, blocks, sum + c, add);
}

constexpr decltype(&panel_by_pairs<1>) panel_by_some_pairs[] = {nullptr, panel_by_pairs<1>, panel_by_pairs<2>,
                                                                panel_by_pairs<3>, panel_by_pairs<4>};

// Where rows are odd, one that is there and nobody wants is multiplied too.
NOINLINE void gemm_many(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add) {
  alignas(64) bf16 x[MOST_PAIRS * 2 * WIDE_ROW];
  for (int b = 0; b < blocks; b += ROW_BLOCKS) {
    int n = std::min(ROW_BLOCKS, blocks - b);
    for (int r = 0; r < rows; r += 2 * MOST_PAIRS) {
      int pairs = std::min(MOST_PAIRS, (rows - r + 1) / 2);
      pair_rows(a + r * stride + b * BLOCK, stride, pairs, n * BLOCK, x);
      panel_by_some_pairs[pairs](x, panel + size_t(b) * PANEL_BLOCK, n, sum + r * PANEL, add || b);
    }
  }
}

void gemm_neon(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next) {
  if (rows > FEW_ROWS) return gemm_many(a, stride, rows, panel, blocks, sum, add);
  if (rows > 0) panel_by_some<bf16>[rows](a, stride, panel, blocks, sum, add);
}
#else
// `rows` rows of up to ROW_BLOCKS blocks as floats, WIDE_ROW apart.
INLINE void widen_rows(const bf16* a, size_t stride, int rows, int blocks, float* x) {
  for (int r = 0; r < rows; r++, a += stride, x += WIDE_ROW)
    for (int k = 0; k < blocks * BLOCK; k += LANES) store(x + k, load(a + k));
}

void gemm_neon(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next) {
  alignas(64) float x[FEW_ROWS * WIDE_ROW];
  for (int b = 0; b < blocks; b += ROW_BLOCKS) {
    int n = std::min(ROW_BLOCKS, blocks - b);
    for (int r = 0; r < rows; r += FEW_ROWS) {
      int some = std::min(FEW_ROWS, rows - r);
      widen_rows(a + r * stride + b * BLOCK, stride, some, n, x);
      panel_by_some<float>[some](x, WIDE_ROW, panel + size_t(b) * PANEL_BLOCK, n, sum + r * PANEL, add || b);
    }
  }
}
#endif

}  // namespace
