// Products of rows as whole numbers of 16 bits with ggml's types (ggml.h), for Arm, as words_neon.h has those of int4: codes become
// numbers with signs, and SMMLA or SDOT multiplies them by both bytes of a row's. Sums of 16 or 32 inputs are exact; they become
// floats and are added in ascending order, times their scales. Minima come off by the row's own sums.
#pragma once
#include "ggml.h"
#include "words_neon.h"

namespace {

// Eight inputs of a pair of columns, vectors 2 `half` and 2 `half` + 1 of a tile, as numbers.
template <GgmlType TYPE>
INLINE void two_vectors(const char* tile, int half, int pair, int8x16_t (&w)[2]) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  auto bytes_at = [](const char* at) { return vld1q_u8((const uint8_t*)at); };
  if constexpr (shape.bits == 8) {
    for (int i = 0; i < 2; i++)
      w[i] = vreinterpretq_s8_u8(veorq_u8(bytes_at(tile + (2 * half + i) * 128 + 16 * pair), vdupq_n_u8(0x80)));
    return;
  }
  uint8x16_t both = bytes_at(tile + half * 128 + 16 * pair);
  uint8x16_t code[2] = {vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4)};
  if constexpr (shape.bits == 5) {
    uint8x8_t fields = vld1_u8((const uint8_t*)tile + 256 + 8 * pair);
    uint8x16_t each = vcombine_u8(vand_u8(fields, vdup_n_u8(15)), vshr_n_u8(fields, 4));
    for (int i = 0; i < 2; i++)
      code[i] = vorrq_u8(code[i], vandq_u8(vshlq_u8(each, vdupq_n_s8(int8_t(4 - 2 * half - i))), vdupq_n_u8(16)));
  }
  if constexpr (shape.bits == 6) {
    uint8x16_t fields = bytes_at(tile + 256 + 16 * pair);
    for (int i = 0; i < 2; i++)
      code[i] = vorrq_u8(code[i], vandq_u8(vshlq_u8(fields, vdupq_n_s8(int8_t(4 - 4 * half - 2 * i))), vdupq_n_u8(48)));
  }
  for (int i = 0; i < 2; i++) w[i] = vsubq_s8(vreinterpretq_s8_u8(code[i]), vdupq_n_s8(int8_t(shape.offset)));
}

struct FourScales {
  float32x4_t step, least;
};

INLINE float32x4_t halves_at(const char* at) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)at)));
}

// Of a block of a group and 4 columns.
template <GgmlType TYPE>
INLINE FourScales scales_of(const char* scales, int block, int half, int column) {
  float32x4_t step = halves_at(scales + column * 2);
  if constexpr (TYPE == GgmlType::q6_k || has_minima(TYPE)) {
    alignas(16) float scale[4], least[4];
    for (int c = 0; c < 4; c++) {
      auto six = [&](int i) { return int(uint8_t(scales[256 + i * 64 + column + c])); };
      if (TYPE == GgmlType::q6_k) {
        scale[c] = float(int8_t(scales[128 + (2 * block + half) * 64 + column + c])), least[c] = 0;
        continue;
      }
      scale[c] = float(block < 4 ? six(block) & 63 : (six(block + 4) & 15) | six(block - 4) >> 6 << 4);
      least[c] = float(block < 4 ? six(block + 4) & 63 : six(block + 4) >> 4 | six(block) >> 6 << 4);
    }
    float32x4_t offset = has_minima(TYPE) ? halves_at(scales + 128 + column * 2) : step;
    return {vmulq_f32(step, vld1q_f32(scale)), vmulq_f32(offset, vld1q_f32(least))};
  }
  return {step, step};
}

// Some rows of a product, and the sums of their sixteens, `stride` bytes apart too.
struct GgmlWords {
  const int8_t* data;
  size_t stride;
  const char* sums;

  INLINE int sum(int row, int block) const {
    int32_t two[2];
    memcpy(two, sums + row * stride + 8 * block, 8);
    return two[0] + two[1];
  }
};

// P pairs of columns of a tile, from inputs 16 first .. 16 end - 1 of a block.
template <int R, int P, GgmlType TYPE>
INLINE void ggml_pairs(const GgmlWords& rows, int block, int first, int end, const char* tile, int pair, const char* scales,
                       int column, float* sum) {
  PairSum total[R][P];
#pragma GCC unroll 2
  for (int half = first; half < end; half++) {
    const int8_t* a = rows.data + (size_t(block) * BLOCK + half * 16) * 2;
    int8x16_t w[P][2];
    for (int p = 0; p < P; p++) two_vectors<TYPE>(tile, half, pair + p, w[p]);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      Inputs x(a + r * rows.stride), y(a + r * rows.stride + 16);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) total[r][p].add(w[p][0], x), total[r][p].add(w[p][1], y);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; p += 2) {
    FourScales scale = scales_of<TYPE>(scales, block % ggml_shape(TYPE).blocks(), first, column + 2 * p);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      float* to = sum + r * PANEL + column + 2 * p;
      float32x4_t part = vcvtq_f32_s32(whole_sums(total[r][p], total[r][p + 1]));
      float32x4_t made = vfmaq_f32(vld1q_f32(to), part, scale.step);
      if (has_minima(TYPE)) made = vfmsq_f32(made, vdupq_n_f32(float(rows.sum(r, block))), scale.least);
      vst1q_f32(to, made);
    }
  }
}

// sum[R][64] += the products of blocks block .. end - 1. Returns where the next group begins.
template <int R, GgmlType TYPE>
NOINLINE const char* ggml_words(const GgmlWords& rows, int block, int end, const char* at, float* sum) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  constexpr int P = std::min(4, pairs_together<R>());
  const char* scales = at;
  for (; block < end; block++) {
    if (block % shape.blocks() == 0) scales = at, at += shape.scale_bytes();
    for (int t = 0; t < 4; t++, at += shape.tile_bytes())
      for (int p = 0; p < PAIRS; p += P) {
        int column = t * 16 + 2 * p;
        if constexpr (TYPE == GgmlType::q6_k) {
          ggml_pairs<R, P, TYPE>(rows, block, 0, 1, at, p, scales, column, sum);
          ggml_pairs<R, P, TYPE>(rows, block, 1, 2, at, p, scales, column, sum);
        } else {
          ggml_pairs<R, P, TYPE>(rows, block, 0, 2, at, p, scales, column, sum);
        }
      }
  }
  return at;
}

using GgmlRows = decltype(&ggml_words<1, GgmlType::q4_0>);
template <GgmlType TYPE>
constexpr GgmlRows ggml_by_rows[] = {nullptr, ggml_words<1, TYPE>, ggml_words<2, TYPE>, ggml_words<3, TYPE>, ggml_words<4, TYPE>};
constexpr const GgmlRows* ggml_by_type[GGML_TYPES] = {ggml_by_rows<GgmlType::q4_0>, ggml_by_rows<GgmlType::q5_0>,
                                                      ggml_by_rows<GgmlType::q8_0>, ggml_by_rows<GgmlType::q4_k>,
                                                      ggml_by_rows<GgmlType::q5_k>, ggml_by_rows<GgmlType::q6_k>};

INLINE size_t word_bytes(int inputs) { return 2 * size_t(int8_blocks(inputs)) * INT8_INPUTS; }

void row_to_ggml_words(const bf16* x, int size, const ByteRows& to, int row) {
  row_to_words(x, size, to, row);
  const int8_t* words = words_of(to, row);
  for (size_t i = 0; i < word_bytes(size); i += 32) {
    int sum = 0;
    for (int j = 0; j < 2; j++)
      sum += vaddlvq_s8(vcombine_s8(vld1_s8(words + i + 16 * j), vdup_n_s8(0))) * 256 +
             vaddlvq_s8(vcombine_s8(vld1_s8(words + i + 16 * j + 8), vdup_n_s8(0)));
    int32_t put = sum;
    memcpy(const_cast<int8_t*>(words) + word_bytes(size) + i / 8, &put, 4);
  }
}

void gemm_ggml_words(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next) {
  constexpr int step = GGML_STRETCH / BLOCK;
  const char *at = panel.data, *then = at;
  memset(sum, 0, size_t(rows) * PANEL * sizeof(float));
  for (int b = 0; b < panel.blocks; b += step, at = then) {
    int end = std::min(panel.blocks, b + step);
    in_word_groups(rows, [&](int r, int some) {
      const int8_t* row = words_of(a, r);
      GgmlWords given{row, 2 * a.stride, reinterpret_cast<const char*>(row) + word_bytes(panel.blocks * BLOCK)};
      then = ggml_by_type[int(panel.type)][some](given, b, end, at, sum + r * PANEL);
    });
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) store(sum + r * PANEL + c, load(sum + r * PANEL + c) * a.scale[r]);
}

// The set with these too.
Isa with_ggml(Isa made) {
  made.to_ggml = row_to_ggml_words, made.gemm_ggml = gemm_ggml_words;
  return made;
}

}  // namespace
