// Products of one to four bf16 rows, and of one row with weights of 8 and fewer bits, with SVE vectors of 32 bytes: twice those of
// gemm_neon.h and words_neon.h, in the same order, so with their bits.
#pragma once
#include <arm_sve.h>

#include <type_traits>

#include "gemm_neon.h"
#include "words_neon.h"

namespace {

// Word L of a row times line L of some, which have sixteen columns: two vectors.
template <int L>
INLINE void add_line_sve(const bfloat16_t* lines, svbfloat16_t x, svfloat32_t& first, svfloat32_t& second) {
  first = svbfdot_lane_f32(first, svld1_vnum_bf16(svptrue_b16(), lines, 2 * L), x, L);
  second = svbfdot_lane_f32(second, svld1_vnum_bf16(svptrue_b16(), lines, 2 * L + 1), x, L);
}

// One tile and one row; both read from element `at` and line `at` / 2 of a block on.
struct TileRow {
  const bf16 *tile, *row;
  float* sum;

  INLINE void add(int b, int at, svfloat32_t& first, svfloat32_t& second) const {
    auto lines = reinterpret_cast<const bfloat16_t*>(tile + size_t(b) * PANEL_BLOCK + at * 16);
    svbfloat16_t x = svld1rq_bf16(svptrue_b16(), reinterpret_cast<const bfloat16_t*>(row + b * BLOCK + at));
    add_line_sve<0>(lines, x, first, second);
    add_line_sve<1>(lines, x, first, second);
    add_line_sve<2>(lines, x, first, second);
    add_line_sve<3>(lines, x, first, second);
  }
  INLINE void begin(bool add, svfloat32_t& first, svfloat32_t& second) const {
    first = add ? svld1_f32(svptrue_b32(), sum) : svdup_n_f32(0);
    second = add ? svld1_f32(svptrue_b32(), sum + 8) : svdup_n_f32(0);
  }
  INLINE void end(svfloat32_t first, svfloat32_t second) const {
    svst1_f32(svptrue_b32(), sum, first);
    svst1_f32(svptrue_b32(), sum + 8, second);
  }
};

// Four sums of sixteen columns are in registers: of R rows, and of as many neighbouring tiles as that allows. Such vectors
// can't stand in an array, so each has a name.
template <int R>
NOINLINE void panel_by_rows_sve(const bf16* a, size_t stride, const bf16* panel, int blocks, float* sum, bool add) {
  constexpr int T = R == 1 ? 4 : R == 2 ? 2 : 1;
  for (int t = 0; t < 4; t += T) {
    auto of = [&](int i) {
      int row = i % R, tile = t + i / R;
      return TileRow{panel + tile * TILE, a + row * stride, sum + row * PANEL + tile * 16};
    };
    const TileRow p = of(0), q = of(1 % (R * T)), r = of(2 % (R * T)), s = of(3 % (R * T));
    svfloat32_t p0, p1, q0, q1, r0, r1, s0, s1;
    p.begin(add, p0, p1), q.begin(add, q0, q1), r.begin(add, r0, r1), s.begin(add, s0, s1);
    for (int b = 0; b < blocks; b++)
      for (int at = 0; at < BLOCK; at += 8) {
        p.add(b, at, p0, p1), q.add(b, at, q0, q1), r.add(b, at, r0, r1);
        if constexpr (R * T == 4) s.add(b, at, s0, s1);
      }
    p.end(p0, p1), q.end(q0, q1), r.end(r0, r1);
    if constexpr (R * T == 4) s.end(s0, s1);
  }
}

constexpr decltype(&panel_by_rows_sve<1>) panel_by_some_sve[] = {nullptr, panel_by_rows_sve<1>, panel_by_rows_sve<2>,
                                                                 panel_by_rows_sve<3>, panel_by_rows_sve<4>};

void gemm_sve(const bf16* a, size_t stride, int rows, const bf16* panel, int blocks, float* sum, bool add, Next) {
  if (rows > FEW_ROWS) return gemm_many(a, stride, rows, panel, blocks, sum, add);
  if (rows > 0) panel_by_some_sve[rows](a, stride, panel, blocks, sum, add);
}

// Of eight columns, whose high and low sums stand in turn.
INLINE svfloat32_t whole_sums_sve(svint32_t a, svint32_t b) {
  svint32_t sums = svmla_n_s32_x(svptrue_b32(), svuzp2_s32(a, b), svuzp1_s32(a, b), 256);
  return svcvt_f32_s32_x(svptrue_b32(), sums);
}

void int8_row(const int8_t* a, size_t, const char* at, int blocks, float* sum) {
  const svbool_t all = svptrue_b8();
  for (int b = 0; b < blocks; b++, a += 2 * INT8_INPUTS)
    for (int c = 0; c < PANEL; c += 8, at += 8 * INT8_INPUTS) {
      svint32_t p = svdup_n_s32(0), q = p;
#pragma GCC unroll 8
      for (int v = 0; v < INT8_INPUTS / 8; v++) {
        svint8_t x = svld1rq_s8(all, a + 16 * v);
        auto line = [&](int i) { return svld1_s8(all, (const int8_t*)at + 32 * i); };
        p = svmmla_s32(p, line(v), x), q = svmmla_s32(q, line(INT8_INPUTS / 8 + v), x);
      }
      svst1_f32(svptrue_b32(), sum + c, svadd_f32_x(svptrue_b32(), svld1_f32(svptrue_b32(), sum + c), whole_sums_sve(p, q)));
    }
}

INLINE svfloat32_t scales_sve(const float* at) { return svld1_f32(svptrue_b32(), at); }
INLINE svfloat32_t scales_sve(const bf16* at) {
  return svreinterpret_f32_u32(svlsl_n_u32_x(svptrue_b32(), svld1uh_u32(svptrue_b32(), &at->bits), 16));
}
INLINE svfloat32_t scales_sve(const Half* at) {
  return svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32(svld1uh_u32(svptrue_b32(), &at->bits)));
}

// Sums of eight columns' lines FIRST and the next, or of all four.
template <class Format, int FIRST>
INLINE svfloat32_t products_sve(const char* at, svint8_t x0, svint8_t x1, svint8_t x2, svint8_t x3) {
  constexpr int quad = 4 * BLOCK * Format::BITS / 8;
  const StoredThere first{at, 0}, second{quad % 32 ? at + quad : at, quad % 32 ? 0 : quad / 32};
  svint32_t a = svdup_n_s32(0), b = a;
  auto plus = [&](auto line, svint8_t x) {
    constexpr int v = FIRST + decltype(line)::value;
    a = svmmla_s32(a, svreinterpret_s8_u8(Format::template numbers<v>(first)), x);
    b = svmmla_s32(b, svreinterpret_s8_u8(Format::template numbers<v>(second)), x);
  };
  plus(std::integral_constant<int, 0>(), x0), plus(std::integral_constant<int, 1>(), x1);
  if constexpr (Format::PARTS == 1) plus(std::integral_constant<int, 2>(), x2), plus(std::integral_constant<int, 3>(), x3);
  return whole_sums_sve(a, b);
}

template <class Format>
NOINLINE const char* row_words(const FewRows& rows, int block, int end, int group, const char* at, float* sum) {
  const svbool_t all = svptrue_b8();
  alignas(64) float room[2 * PANEL];
  const char* scales = at;
  for (int left = 0; block < end; block++, left--) {
    if (left == 0) left = group, scales = at, at += Format::SCALE_BYTES;
    auto scale = Format::scales(scales, group - left, 0, PANEL, room);
    const int8_t* x = rows.block(0, block);
    svint8_t x0 = svld1rq_s8(all, x), x1 = svld1rq_s8(all, x + 16), x2 = svld1rq_s8(all, x + 32), x3 = svld1rq_s8(all, x + 48);
    float less = Format::MINIMA ? rows.sum(0, block) : 0.0f;
    for (int c = 0; c < PANEL; c += 8, at += BLOCK * Format::BITS) {
      svfloat32_t made = svld1_f32(svptrue_b32(), sum + c);
      made = svmla_f32_x(svptrue_b32(), made, products_sve<Format, 0>(at, x0, x1, x2, x3), scales_sve(scale + c));
      if constexpr (Format::PARTS == 2)
        made = svmla_f32_x(svptrue_b32(), made, products_sve<Format, 2>(at, x2, x3, x2, x3), scales_sve(scale + PANEL + c));
      if constexpr (Format::MINIMA) made = svmls_n_f32_x(svptrue_b32(), made, scales_sve(scale + PANEL + c), less);
      svst1_f32(svptrue_b32(), sum + c, made);
    }
  }
  return at;
}

}  // namespace
