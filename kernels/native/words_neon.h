// Products of rows as whole numbers of 16 bits with int8 and int4 weights, for Arm. A number is two bytes with signs, and a
// row lies as eight high bytes, then the eight low ones, at data + 2 r * stride of a ByteRows. Sums of a block are exact and
// are added in float in ascending order of blocks, so a row's bits depend on no batch, nor on which instruction there is.
//
// HAS_I8MM: SMMLA multiplies eight inputs of two columns (int8.h, int4.h) by both bytes of a row at once. Without, SDOT does
// it in two steps.
#pragma once
#include <arm_neon.h>
#include <math.h>

#include <algorithm>

#include "int4.h"
#include "int8.h"
#include "vec.h"

namespace {

constexpr int MOST_WORD = 32639;       // so that both bytes of a number have signs
constexpr float LEAST_ROW = 1e-30f;    // the largest number of a row below which it counts as zeros: 1 / x must be a float
constexpr int WORD_ROWS = 4;           // of a pass
constexpr int WORD_CHUNK = 16 << 10;   // bytes of weights that several passes take in turn
constexpr int PAIRS = 8;               // of columns of a tile

INLINE uint16x8_t eight_of(const bf16* x, int left) {
  if (left >= 8) return vld1q_u16(&x->bits);
  bf16 some[8] = {};
  if (left > 0) memcpy(some, x, left * sizeof(bf16));
  return vld1q_u16(&some->bits);
}

// The largest magnitude of a row as the bits of a bf16, which order as whole numbers do.
INLINE unsigned most_word(const bf16* x, int size) {
  uint16x8_t most = vdupq_n_u16(0);
  for (int i = 0; i < size; i += 8) most = vmaxq_u16(most, vandq_u16(eight_of(x + i, size - i), vdupq_n_u16(0x7fff)));
  return vmaxvq_u16(most);
}

INLINE int16x4_t numbers_of(uint16x4_t four, float inverse) {
  float32x4_t wide = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(four), 16));
  return vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(wide, inverse)));
}

void row_to_words(const bf16* x, int size, const ByteRows& to, int row) {
  int8_t* out = reinterpret_cast<int8_t*>(to.data + 2 * row * to.stride);
  unsigned bits = most_word(x, size) << 16;
  float most;
  memcpy(&most, &bits, 4);
  bool finite = bits < 0x7f800000u;
  to.scale[row] = finite ? most / MOST_WORD : NAN;
  float inverse = finite && most > LEAST_ROW ? MOST_WORD / most : 0.0f;
  for (int i = 0; i < int8_blocks(size) * INT8_INPUTS; i += 8, out += 16) {
    uint16x8_t narrow = finite ? eight_of(x + i, size - i) : vdupq_n_u16(0);
    int16x8_t words = vcombine_s16(numbers_of(vget_low_u16(narrow), inverse), numbers_of(vget_high_u16(narrow), inverse));
    vst1q_s8(out, vcombine_s8(vshrn_n_s16(vaddq_s16(words, vdupq_n_s16(128)), 8), vmovn_s16(words)));
  }
}

#ifdef HAS_I8MM
constexpr int PAIR_SUMS = 1;  // registers
struct Inputs {
  int8x16_t bytes;
  INLINE explicit Inputs(const int8_t* x) : bytes(vld1q_s8(x)) {}
};
// Of a pair of columns: the first's high and low sums, the second's.
struct PairSum {
  int32x4_t sum = vdupq_n_s32(0);
  INLINE void add(int8x16_t w, const Inputs& x) { sum = vmmlaq_s32(sum, w, x.bytes); }
};
INLINE int32x4_t whole_sums(const PairSum& a, const PairSum& b) {
  const int32x4_t places = {8, 0, 8, 0};
  return vpaddq_s32(vshlq_s32(a.sum, places), vshlq_s32(b.sum, places));
}
#else
constexpr int PAIR_SUMS = 2;
struct Inputs {
  int8x16_t high, low;
  INLINE explicit Inputs(const int8_t* x) {
    int64x2x2_t both = vld2q_dup_s64((const int64_t*)x);
    high = vreinterpretq_s8_s64(both.val[0]), low = vreinterpretq_s8_s64(both.val[1]);
  }
};
// Of a pair of columns: two sums of each, one of four inputs and one of the next four.
struct PairSum {
  int32x4_t high = vdupq_n_s32(0), low = vdupq_n_s32(0);
  INLINE void add(int8x16_t w, const Inputs& x) { high = vdotq_s32(high, w, x.high), low = vdotq_s32(low, w, x.low); }
};
INLINE int32x4_t whole_sums(const PairSum& a, const PairSum& b) {
  return vmlaq_n_s32(vpaddq_s32(a.low, b.low), vpaddq_s32(a.high, b.high), 256);
}
#endif

// Pairs of columns of a tile whose sums are in registers together.
template <int R>
constexpr int pairs_together() {
  int most = 16 / (R * PAIR_SUMS);
  return most >= 8 ? 8 : most >= 4 ? 4 : 2;
}

// Eight inputs of P pairs of columns.
template <int P>
INLINE void load_pairs(const void* at, int8x16_t (&w)[P]) {
  const int8_t* bytes = static_cast<const int8_t*>(at);
  for (int p = 0; p < P; p++) w[p] = vld1q_s8(bytes + 16 * p);
}

// P pairs of columns of a tile of one block.
template <int R, int P>
INLINE void int8_pairs(const int8_t* a, size_t stride, const int8_t* tile, float* sum) {
  PairSum total[R][P];
#pragma GCC unroll 2
  for (int i = 0; i < INT8_INPUTS; i += 8, a += 16, tile += 16 * PAIRS) {
    int8x16_t w[P];
    load_pairs<P>(tile, w);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      Inputs x(a + r * stride);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) total[r][p].add(w[p], x);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p += 2) {
      float* to = sum + r * PANEL + 2 * p;
      vst1q_f32(to, vaddq_f32(vld1q_f32(to), vcvtq_f32_s32(whole_sums(total[r][p], total[r][p + 1]))));
    }
}

// sum[R][64] += the products of so many blocks, without any scale.
template <int R>
NOINLINE void int8_words(const int8_t* a, size_t stride, const int8_t* at, int blocks, float* sum) {
  constexpr int P = pairs_together<R>();
  for (int b = 0; b < blocks; b++, a += 2 * INT8_INPUTS)
    for (int t = 0; t < 4; t++, at += INT8_TILE)
      for (int p = 0; p < PAIRS; p += P) int8_pairs<R, P>(a, stride, at + 16 * p, sum + t * 16 + 2 * p);
}

// Scales of four columns, as floats.
template <bool WIDE>
INLINE float32x4_t int4_scale(const char* scales, int column) {
  if (WIDE) return vld1q_f32((const float*)scales + column);
  uint16x8_t narrow = vcombine_u16(vld1_u16((const uint16_t*)scales + column), vdup_n_u16(0));
  return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), narrow));
}

// Sixteen numbers of codes' lower halves, or of the upper ones: times 16, if not of e2m1.
template <bool E2M1>
INLINE int8x16_t lower_numbers(uint8x16_t codes) {
  if (E2M1) return vqtbl1q_s8(vld1q_s8(E2M1_TWICE), vandq_u8(codes, vdupq_n_u8(15)));
  return vreinterpretq_s8_u8(vshlq_n_u8(codes, 4));
}
template <bool E2M1>
INLINE int8x16_t upper_numbers(uint8x16_t codes) {
  if (E2M1) return vqtbl1q_s8(vld1q_s8(E2M1_TWICE), vshrq_n_u8(codes, 4));
  return vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(0xf0)));
}

template <bool E2M1>
INLINE float32x4_t as_floats(int32x4_t sums) {
  return E2M1 ? vcvtq_f32_s32(sums) : vcvtq_n_f32_s32(sums, 4);
}

template <int R, int P, bool E2M1, bool WIDE>
INLINE void int4_pairs(const int8_t* a, size_t stride, const char* tile, const char* scales, float* sum) {
  PairSum total[R][P];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++, a += 32, tile += 16 * PAIRS) {
    int8x16_t codes[P];
    load_pairs<P>(tile, codes);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      Inputs x(a + r * stride), y(a + r * stride + 16);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        total[r][p].add(lower_numbers<E2M1>(vreinterpretq_u8_s8(codes[p])), x);
        total[r][p].add(upper_numbers<E2M1>(vreinterpretq_u8_s8(codes[p])), y);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; p += 2) {
    float32x4_t scale = int4_scale<WIDE>(scales, 2 * p);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      float* to = sum + r * PANEL + 2 * p;
      vst1q_f32(to, vfmaq_f32(vld1q_f32(to), as_floats<E2M1>(whole_sums(total[r][p], total[r][p + 1])), scale));
    }
  }
}

// sum[R][64] += the products of one group times its scales. Returns where the next group begins.
template <int R, bool E2M1, bool WIDE>
NOINLINE const char* int4_words(const int8_t* a, size_t stride, const char* at, int blocks, float* sum) {
  constexpr int P = pairs_together<R>(), scale_bytes = WIDE ? 4 : 2;
  const char* scales = at;
  at += PANEL * scale_bytes;
  for (int b = 0; b < blocks; b++, a += 2 * BLOCK)
    for (int c = 0; c < PANEL; c += 16, at += INT4_TILE)
      for (int p = 0; p < PAIRS; p += P)
        int4_pairs<R, P, E2M1, WIDE>(a, stride, at + 16 * p, scales + (c + 2 * p) * scale_bytes, sum + c + 2 * p);
  return at;
}

#ifdef HAS_SVE
void int8_row(const int8_t* a, size_t stride, const int8_t* at, int blocks, float* sum);  // loops_sve.h
template <bool E2M1, bool WIDE>
const char* int4_row(const int8_t* a, size_t stride, const char* at, int blocks, float* sum);
#else
constexpr auto int8_row = int8_words<1>;
template <bool E2M1, bool WIDE>
constexpr auto int4_row = int4_words<1, E2M1, WIDE>;
#endif

constexpr decltype(&int8_words<2>) int8_words_of[] = {nullptr, int8_row, int8_words<2>, int8_words<3>, int8_words<4>};
using Int4Words = decltype(&int4_words<2, false, false>);
template <bool E2M1, bool WIDE>
constexpr Int4Words int4_words_by_rows[] = {nullptr, int4_row<E2M1, WIDE>, int4_words<2, E2M1, WIDE>,
                                            int4_words<3, E2M1, WIDE>, int4_words<4, E2M1, WIDE>};

INLINE const Int4Words* int4_words_of(bool e2m1, bool wide) {
  if (e2m1) return wide ? int4_words_by_rows<true, true> : int4_words_by_rows<true, false>;
  return wide ? int4_words_by_rows<false, true> : int4_words_by_rows<false, false>;
}

// Calls work(first row, rows) for all rows, in as few groups as there are and all alike.
template <class Work>
INLINE void in_word_groups(int rows, const Work& work) {
  int groups = (rows + WORD_ROWS - 1) / WORD_ROWS;
  for (int i = 0, r = 0; i < groups; i++) {
    int n = (rows - r) / (groups - i);
    work(r, n);
    r += n;
  }
}

INLINE const int8_t* words_of(const ByteRows& a, int row) { return reinterpret_cast<const int8_t*>(a.data + 2 * row * a.stride); }

void gemm_int8_words(const ByteRows& a, int rows, const Int8Panel& panel, float* sum, Next) {
  constexpr int chunk = WORD_CHUNK / INT8_BLOCK;
  int step = rows <= WORD_ROWS ? panel.blocks : chunk;
  memset(sum, 0, size_t(rows) * PANEL * sizeof(float));
  for (int b = 0; b < panel.blocks; b += step) {
    int n = std::min(step, panel.blocks - b);
    in_word_groups(rows, [&](int r, int some) {
      int8_words_of[some](words_of(a, r) + b * 2 * INT8_INPUTS, 2 * a.stride, panel.data + size_t(b) * INT8_BLOCK, n,
                          sum + r * PANEL);
    });
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) {
      float* to = sum + r * PANEL + c;
      store(to, load(to) * (load(panel.scale + c) * splat(a.scale[r])));
    }
}

void gemm_int4_words(const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next) {
  const char *at = panel.data, *then = at;
  auto words = int4_words_of(panel.e2m1, panel.wide);
  memset(sum, 0, size_t(rows) * PANEL * sizeof(float));
  for (int b = 0; b < panel.blocks; b += panel.group, at = then) {
    int n = std::min(panel.group, panel.blocks - b);
    in_word_groups(rows, [&](int r, int some) {
      then = words[some](words_of(a, r) + b * 2 * BLOCK, 2 * a.stride, at, n, sum + r * PANEL);
    });
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) store(sum + r * PANEL + c, load(sum + r * PANEL + c) * a.scale[r]);
}

// The set with these for weights in 8 and 4 bits.
Isa with_words(Isa made) {
  made.to_bytes = row_to_words, made.gemm_bytes = gemm_int8_words;
  made.to_words = row_to_words, made.gemm_words = gemm_int4_words;
  return made;
}

}  // namespace
