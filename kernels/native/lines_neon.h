// Eight inputs of four columns of weights (int4.h, int8.h, ggml.h), and their products with rows as words_neon.h makes them.
// HAS_I8MM: SMMLA multiplies two columns by both bytes of a row's numbers at once. HAS_DOTPROD alone: SDOT multiplies four inputs
// of four columns, first by high bytes; rows for weights of few bits are single bytes there, with a scale for every block
// (BYTE_ROWS), for it would take twice as many SDOTs as llama.cpp's loops. With neither SMLAL multiplies numbers of 16 bits.
#pragma once
#include <arm_neon.h>
#ifdef HAS_SVE
#include <arm_sve.h>
#endif

#include "int4.h"
#include "vec.h"

#if defined(HAS_DOTPROD) && !defined(HAS_I8MM)
#define BYTE_ROWS
#endif

namespace {

// Eight inputs of four columns: two columns each, or, where SDOT multiplies them, four inputs each.
struct Line {
  uint8x16_t a, b;
};

// The next one. An LD2 has no offset: its pointer is kept from becoming several, so that it steps as it loads.
INLINE Line next_line(const char*& at) {
#ifdef BYTE_ROWS
  uint32x4x2_t both = vld2q_u32((const uint32_t*)at);
  at += 32;
  asm("" : "+r"(at));
  return {vreinterpretq_u8_u32(both.val[0]), vreinterpretq_u8_u32(both.val[1])};
#else
  at += 32;
  return {vld1q_u8((const uint8_t*)at - 32), vld1q_u8((const uint8_t*)at - 16)};
#endif
}
template <int N>
INLINE Line up(Line x) {
  return {vshlq_n_u8(x.a, N), vshlq_n_u8(x.b, N)};
}
template <int N>
INLINE Line down(Line x) {
  return {vshrq_n_u8(x.a, N), vshrq_n_u8(x.b, N)};
}
INLINE Line masked(Line x, uint8_t mask) { return {vandq_u8(x.a, vdupq_n_u8(mask)), vandq_u8(x.b, vdupq_n_u8(mask))}; }
INLINE Line doubled_e2m1(Line x) {
  const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(E2M1_TWICE));
  return {vqtbl1q_u8(table, x.a), vqtbl1q_u8(table, x.b)};
}

// Bits above the fourth: 4 of each number are in half a byte, those of the last two columns above.
INLINE Line next_fields(const char*& at) {
  uint8x16_t lower = vld1q_u8((const uint8_t*)at), upper = vshrq_n_u8(lower, 4);
  at += 16;
#ifdef BYTE_ROWS
  uint32x4x2_t both = vuzpq_u32(vreinterpretq_u32_u8(lower), vreinterpretq_u32_u8(upper));
  return {vreinterpretq_u8_u32(both.val[0]), vreinterpretq_u8_u32(both.val[1])};
#else
  return {lower, upper};
#endif
}
// Bits of `mask` from `a`, the others from `b`.
INLINE Line chosen(Line a, Line b, uint8_t mask) {
  return {vbslq_u8(vdupq_n_u8(mask), a.a, b.a), vbslq_u8(vdupq_n_u8(mask), a.b, b.b)};
}

// What is kept of four columns of a block, numbers of so many bits. Each member is named where it is made: what a loop fills is
// copied from register to register.
template <int BITS>
struct Stored {
  Line line[4];
  INLINE Line operator[](int i) const { return line[i]; }
  INLINE Line fields() const { return line[2]; }
};
template <int BITS>
INLINE Stored<BITS> next_stored(const char*& at) {
  if constexpr (BITS == 4) return {{next_line(at), next_line(at)}};
  if constexpr (BITS == 5) return {{next_line(at), next_line(at), next_fields(at)}};
  if constexpr (BITS == 6) return {{next_line(at), next_line(at), next_line(at)}};
  if constexpr (BITS == 8) return {{next_line(at), next_line(at), next_line(at), next_line(at)}};
}

// A row's inputs of N lines.
template <int N>
struct Inputs {
  int8x16_t at[N];
  INLINE explicit Inputs(const int8_t* x) {
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) at[v] = vld1q_s8(x + 16 * v);
  }
  Inputs() = default;
};

INLINE int8x16_t with_signs(uint8x16_t x) { return vreinterpretq_s8_u8(x); }

// Sums of four columns' lines FIRST to END - 1.
template <int FIRST, int END, int N>
INLINE float32x4_t products(const Line (&w)[N], const Inputs<N>& x) {
#ifdef HAS_I8MM
  int32x4_t a = vdupq_n_s32(0), b = a;
#pragma GCC unroll 8
  for (int v = FIRST; v < END; v++)
    a = vmmlaq_s32(a, with_signs(w[v].a), x.at[v]), b = vmmlaq_s32(b, with_signs(w[v].b), x.at[v]);
  const int32x4_t places = {8, 0, 8, 0};
  return vcvtq_f32_s32(vpaddq_s32(vshlq_s32(a, places), vshlq_s32(b, places)));
#elif defined(HAS_DOTPROD)
  int32x4_t sum = vdupq_n_s32(0);
#pragma GCC unroll 8
  for (int v = FIRST; v < END; v++)
    sum = vdotq_laneq_s32(vdotq_laneq_s32(sum, with_signs(w[v].a), x.at[v], 0), with_signs(w[v].b), x.at[v], 1);
  sum = vshlq_n_s32(sum, 8);
#pragma GCC unroll 8
  for (int v = FIRST; v < END; v++)
    sum = vdotq_laneq_s32(vdotq_laneq_s32(sum, with_signs(w[v].a), x.at[v], 2), with_signs(w[v].b), x.at[v], 3);
  return vcvtq_f32_s32(sum);
#else
  int32x4_t sum[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
#pragma GCC unroll 8
  for (int v = FIRST; v < END; v++) {
    int16x8_t number = vreinterpretq_s16_s8(x.at[v]);
    int8x16_t two[2] = {with_signs(w[v].a), with_signs(w[v].b)};
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      int16x8_t wide = c % 2 ? vmovl_high_s8(two[c / 2]) : vmovl_s8(vget_low_s8(two[c / 2]));
      sum[c] = vmlal_high_s16(vmlal_s16(sum[c], vget_low_s16(wide), vget_low_s16(number)), wide, number);
    }
  }
  return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(sum[0], sum[1]), vpaddq_s32(sum[2], sum[3])));
#endif
}

#ifdef BYTE_ROWS
// A row's inputs of a block as bytes.
struct ByteInputs {
  int8x16_t at[2];
  ByteInputs() = default;
  INLINE explicit ByteInputs(const int8_t* x) : at{vld1q_s8(x), vld1q_s8(x + 16)} {}
};

template <int FIRST, int END, int N>
INLINE float32x4_t products(const Line (&w)[N], const ByteInputs& x) {
  int32x4_t sum = vdupq_n_s32(0);
#pragma GCC unroll 2
  for (int v = FIRST; v < END; v += 2) {
    sum = vdotq_laneq_s32(vdotq_laneq_s32(sum, with_signs(w[v].a), x.at[v / 2], 0), with_signs(w[v].b), x.at[v / 2], 1);
    sum = vdotq_laneq_s32(vdotq_laneq_s32(sum, with_signs(w[v + 1].a), x.at[v / 2], 2), with_signs(w[v + 1].b), x.at[v / 2], 3);
  }
  return vcvtq_f32_s32(sum);
}
#endif

// Scales of eight columns.
struct EightScales {
  float32x4_t at[2];
};
INLINE EightScales eight_scales(const float* at) { return {{vld1q_f32(at), vld1q_f32(at + 4)}}; }
INLINE EightScales eight_scales(const bf16* at) {
  uint16x8_t words = vld1q_u16(&at->bits);
  return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(words, 16))}};
}
struct Half {
  uint16_t bits;
};
INLINE float32x4_t halves(uint16x4_t four) { return vcvt_f32_f16(vreinterpret_f16_u16(four)); }
INLINE EightScales eight_scales(const Half* at) {
  uint16x8_t words = vld1q_u16(&at->bits);
  return {{halves(vget_low_u16(words)), vcvt_high_f32_f16(vreinterpretq_f16_u16(words))}};
}

#ifdef HAS_SVE
// The same in one vector of 32 bytes.
template <int N>
INLINE svuint8_t up(svuint8_t x) {
  return svlsl_n_u8_x(svptrue_b8(), x, N);
}
template <int N>
INLINE svuint8_t down(svuint8_t x) {
  return svlsr_n_u8_x(svptrue_b8(), x, N);
}
INLINE svuint8_t masked(svuint8_t x, uint8_t mask) { return svand_n_u8_x(svptrue_b8(), x, mask); }
INLINE svuint8_t doubled_e2m1(svuint8_t x) {
  return svtbl_u8(svreinterpret_u8_s8(svld1rq_s8(svptrue_b8(), E2M1_TWICE)), x);
}
INLINE svuint8_t chosen(svuint8_t a, svuint8_t b, uint8_t mask) {
  return svorr_u8_x(svptrue_b8(), masked(a, mask), masked(b, uint8_t(~mask)));
}
// What is kept of four columns, `first` lines behind `at`.
struct StoredThere {
  const char* at;
  int first;
  INLINE svuint8_t operator[](int i) const { return svld1_vnum_u8(svptrue_b8(), (const uint8_t*)at, first + i); }
  INLINE svuint8_t fields() const {
    static const uint8_t places[32] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
    const svbool_t all = svptrue_b8();
    return svlsr_u8_x(all, svld1rq_u8(all, (const uint8_t*)at + 64), svld1_u8(all, places));
  }
};
#endif

}  // namespace
