// Products of one to four bf16 rows, and of one row with int8 and int4 weights, with SVE vectors of 32 bytes: twice those of
// gemm_neon.h and words_neon.h, in the same order, so with their bits.
#pragma once
#include <arm_sve.h>

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

INLINE void add_eight(float* to, svfloat32_t part, svfloat32_t scale) {
  svst1_f32(svptrue_b32(), to, svmla_f32_x(svptrue_b32(), svld1_f32(svptrue_b32(), to), part, scale));
}

void int8_row(const int8_t* a, size_t, const int8_t* at, int blocks, float* sum) {
  const svbool_t all = svptrue_b8();
  for (int b = 0; b < blocks; b++, a += 2 * INT8_INPUTS)
    for (int c = 0; c < PANEL; c += 16) {
      svint32_t s0 = svdup_n_s32(0), s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 4
      for (int i = 0; i < INT8_INPUTS; i += 8, at += 16 * PAIRS) {
        svint8_t x = svld1rq_s8(all, a + 2 * i);
        s0 = svmmla_s32(s0, svld1_s8(all, at), x), s1 = svmmla_s32(s1, svld1_s8(all, at + 32), x);
        s2 = svmmla_s32(s2, svld1_s8(all, at + 64), x), s3 = svmmla_s32(s3, svld1_s8(all, at + 96), x);
      }
      add_eight(sum + c, whole_sums_sve(s0, s1), svdup_n_f32(1));
      add_eight(sum + c + 8, whole_sums_sve(s2, s3), svdup_n_f32(1));
    }
}

// Scales of eight columns; a sixteenth of each where numbers are 16 times theirs.
template <bool E2M1, bool WIDE>
INLINE svfloat32_t int4_scale_sve(const char* scales, int column) {
  svfloat32_t scale;
  if constexpr (WIDE)
    scale = svld1_f32(svptrue_b32(), (const float*)scales + column);
  else
    scale = svreinterpret_f32_u32(svlsl_n_u32_x(svptrue_b32(), svld1uh_u32(svptrue_b32(), (const uint16_t*)scales + column), 16));
  return E2M1 ? scale : svmul_n_f32_x(svptrue_b32(), scale, 0.0625f);
}

// Both numbers of 32 codes, times eight inputs each.
template <bool E2M1>
INLINE svint32_t plus_codes(svint32_t sum, const char* at, svint8_t x, svint8_t y) {
  const svbool_t all = svptrue_b8();
  svuint8_t codes = svld1_u8(all, (const uint8_t*)at);
  svint8_t lower, upper;
  if constexpr (E2M1) {
    svint8_t table = svld1rq_s8(all, E2M1_TWICE);
    lower = svtbl_s8(table, svand_n_u8_x(all, codes, 15)), upper = svtbl_s8(table, svlsr_n_u8_x(all, codes, 4));
  } else {
    lower = svreinterpret_s8_u8(svlsl_n_u8_x(all, codes, 4)), upper = svreinterpret_s8_u8(svand_n_u8_x(all, codes, 0xf0));
  }
  return svmmla_s32(svmmla_s32(sum, lower, x), upper, y);
}

template <bool E2M1, bool WIDE>
const char* int4_row(const int8_t* a, size_t, const char* at, int blocks, float* sum) {
  const svbool_t all = svptrue_b8();
  const char* scales = at;
  at += PANEL * (WIDE ? 4 : 2);
  for (int b = 0; b < blocks; b++, a += 2 * BLOCK)
    for (int c = 0; c < PANEL; c += 16) {
      svint32_t s0 = svdup_n_s32(0), s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++, at += 16 * PAIRS) {
        svint8_t x = svld1rq_s8(all, a + 32 * half), y = svld1rq_s8(all, a + 32 * half + 16);
        s0 = plus_codes<E2M1>(s0, at, x, y), s1 = plus_codes<E2M1>(s1, at + 32, x, y);
        s2 = plus_codes<E2M1>(s2, at + 64, x, y), s3 = plus_codes<E2M1>(s3, at + 96, x, y);
      }
      add_eight(sum + c, whole_sums_sve(s0, s1), int4_scale_sve<E2M1, WIDE>(scales, c));
      add_eight(sum + c + 8, whole_sums_sve(s2, s3), int4_scale_sve<E2M1, WIDE>(scales, c + 8));
    }
  return at;
}

}  // namespace
