// Rows of bf16 as whole numbers, for Arm. For int8 weights they have 16 bits, and for weights of few bits 16 too or, with BYTE_ROWS
// (lines_neon.h), 8.
//
// A row lies at data + 2 r * stride of a ByteRows. One of 16 bits: eight high bytes, which have signs as the low ones do, then
// the eight low ones; without HAS_DOTPROD it is numbers of 16 bits. One of 8 bits: its numbers; behind them each block of 32
// has what a number of it is worth, and that times their sum.
#pragma once
#include <arm_neon.h>
#include <math.h>

#include <algorithm>

#include "int8.h"
#include "lines_neon.h"
#include "vec.h"

namespace {

constexpr int MOST_WORD = 32639;       // so that both bytes of a number have signs
constexpr int MOST_BYTE = 127;
constexpr float LEAST_ROW = 1e-30f;    // the largest number of a row below which it counts as zeros: 1 / x must be a float

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

INLINE int8x16_t as_row(int16x8_t words) {
#ifdef HAS_DOTPROD
  return vcombine_s8(vshrn_n_s16(vaddq_s16(words, vdupq_n_s16(128)), 8), vmovn_s16(words));
#else
  return vreinterpretq_s8_s16(words);
#endif
}

// What numbers of bf16 become as whole ones up to `limit`: what one of these is worth, NAN unless all are finite.
struct Steps {
  bool finite;
  float step, inverse;

  INLINE Steps(const bf16* x, int size, int limit) {
    unsigned bits = most_word(x, size) << 16;
    float most;
    memcpy(&most, &bits, 4);
    finite = bits < 0x7f800000u;
    step = finite ? most / limit : NAN;
    inverse = finite && most > LEAST_ROW ? limit / most : 0.0f;
  }
  INLINE int16x8_t eight(const bf16* x, int left) const {
    uint16x8_t narrow = finite ? eight_of(x, left) : vdupq_n_u16(0);
    return vcombine_s16(numbers_of(vget_low_u16(narrow), inverse), numbers_of(vget_high_u16(narrow), inverse));
  }
};

// put(i, numbers i to i + 7) for each eight, zeros past the last.
template <class Put>
INLINE void row_to_words(const bf16* x, int size, const ByteRows& to, int row, const Put& put) {
  int8_t* out = reinterpret_cast<int8_t*>(to.data + 2 * row * to.stride);
  Steps steps(x, size, MOST_WORD);
  to.scale[row] = steps.step;
  for (int i = 0; i < int8_blocks(size) * INT8_INPUTS; i += 8, out += 16) {
    int16x8_t words = steps.eight(x + i, size - i);
    vst1q_s8(out, as_row(words));
    put(i, words);
  }
}

void row_to_plain_words(const bf16* x, int size, const ByteRows& to, int row) {
  row_to_words(x, size, to, row, [](int, int16x8_t) {});
}

// Bytes of a row as int8 weights are multiplied by it.
INLINE size_t word_bytes(int inputs) { return 2 * size_t(int8_blocks(inputs)) * INT8_INPUTS; }

#ifdef BYTE_ROWS
INLINE size_t few_bytes(int inputs) { return word_bytes(inputs) / 2; }

void row_to_few(const bf16* x, int size, const ByteRows& to, int row) {
  int8_t* out = reinterpret_cast<int8_t*>(to.data + 2 * row * to.stride);
  auto* of_block = reinterpret_cast<float*>(out + few_bytes(size));
  to.scale[row] = 1.0f;
  for (int left = size; left > 0; left -= BLOCK, x += BLOCK, of_block += 2) {
    Steps steps(x, std::min(left, BLOCK), MOST_BYTE);
    int sum = 0;
    for (int i = 0; i < BLOCK; i += 8, out += 8) {
      int16x8_t words = steps.eight(x + i, left - i);
      vst1_s8(out, vmovn_s16(words));
      sum += vaddvq_s16(words);
    }
    of_block[0] = steps.step, of_block[1] = steps.step * float(sum);
  }
}

// Some rows of a product with weights of few bits, and one's block: its numbers, their scale, and that times their sum.
struct FewRows {
  const int8_t* data;
  size_t stride;
  const char* of_blocks;
};
template <bool SUMS>
struct FewInputs {
  ByteInputs x;
  float step, sum;

  FewInputs() = default;
  INLINE FewInputs(const FewRows& rows, int row, int index) : x(rows.data + row * rows.stride + size_t(index) * BLOCK) {
    const char* of_block = rows.of_blocks + row * rows.stride + 8 * index;
    memcpy(&step, of_block, 4);
    if (SUMS) memcpy(&sum, of_block + 4, 4);
  }
  INLINE float32x4_t scaled(float32x4_t scale) const { return vmulq_n_f32(scale, step); }
};
#else
INLINE size_t few_bytes(int inputs) { return word_bytes(inputs); }
constexpr auto row_to_few = row_to_plain_words;

// Some rows of a product; behind each may lie the sums of its sixteens (ggml.h).
struct FewRows {
  const int8_t* data;
  size_t stride;
  const char* sums;

  INLINE const int8_t* block(int row, int index) const { return data + row * stride + size_t(index) * BLOCK * 2; }
  INLINE float sum(int row, int index) const {
    int32_t two[2] = {};
    memcpy(two, sums + row * stride + 8 * index, 8);
    return float(two[0] + two[1]);
  }
};
template <bool SUMS>
struct FewInputs {
  Inputs<BLOCK / 8> x;
  float sum;

  FewInputs() = default;
  INLINE FewInputs(const FewRows& rows, int row, int index)
      : x(rows.block(row, index)), sum(SUMS ? rows.sum(row, index) : 0.0f) {}
  INLINE float32x4_t scaled(float32x4_t scale) const { return scale; }
};
#endif

}  // namespace
