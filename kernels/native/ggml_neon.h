// Products of rows (rows_neon.h) with ggml's types (ggml.h), for Arm, as words_neon.h has those of int4. Minima come off by the
// row's own sums.
#pragma once
#include "ggml.h"
#include "words_neon.h"

namespace {

// 16 columns' `numbers`, each times its float16.
INLINE void put_scales(int8x16_t numbers, const char* halves_at, float* to) {
  int16x8_t wide[2] = {vmovl_s8(vget_low_s8(numbers)), vmovl_high_s8(numbers)};
  for (int i = 0; i < 2; i++) {
    EightScales by = eight_scales((const Half*)halves_at + 8 * i);
    vst1q_f32(to + 8 * i, vmulq_f32(by.at[0], vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide[i])))));
    vst1q_f32(to + 8 * i + 4, vmulq_f32(by.at[1], vcvtq_f32_s32(vmovl_high_s16(wide[i]))));
  }
}

template <GgmlType TYPE>
struct OfGgml {
  static constexpr GgmlShape SHAPE = ggml_shape(TYPE);
  static constexpr bool MINIMA = has_minima(TYPE);
  static constexpr int FACTOR = MINIMA ? 1 : 1 << (8 - SHAPE.bits), BITS = SHAPE.bits, SCALE_BYTES = SHAPE.scale_bytes(),
                       PARTS = TYPE == GgmlType::q6_k ? 2 : 1;
  using Scale = std::conditional_t<MINIMA || PARTS == 2, float, Half>;

  template <int V, class S>
  static INLINE auto numbers(const S& stored) {
    if constexpr (BITS == 8) return stored[V];
    else if constexpr (BITS == 6) return six(V % 2 ? down<2>(stored[V / 2]) : up<2>(stored[V / 2]), upper_two<V>(stored[2]));
    else if constexpr (BITS == 4 && !MINIMA) return Int4<false, false>::template numbers<V>(stored);
    else {
      auto low = V % 2 ? down<4>(stored[V / 2]) : masked(stored[V / 2], 15);
      if constexpr (BITS == 4) return low;
      else {
        auto code = chosen(up<4 - V>(stored.fields()), low, 16);
        if constexpr (MINIMA) return code;
        else return up<3>(code);
      }
    }
  }
  template <class L>
  static INLINE L six(L lower, L upper) { return chosen(lower, upper, 0x3c); }
  template <int V, class L>
  static INLINE L upper_two(L fields) {
    if constexpr (V == 3) return masked(fields, 0xc0);
    else return up<6 - 2 * V>(fields);
  }

  static INLINE const Scale* scales(const char* at, int block, int first, int end, float* room) {
    if constexpr (!MINIMA && PARTS == 1) return (const Half*)at;
    else {
      for (int c = first; c < end; c += 16) {
        auto bytes = [&](int kind, int i) { return vld1q_u8((const uint8_t*)at + kind + i * 64 + c); };
        if constexpr (PARTS == 2) {
          for (int i = 0; i < 2; i++) put_scales(with_signs(bytes(128, 2 * block + i)), at + 2 * c, room + i * PANEL + c);
        } else {
          uint8x16_t scale, least;
          if (block < 4) {
            scale = vandq_u8(bytes(256, block), vdupq_n_u8(63)), least = vandq_u8(bytes(256, block + 4), vdupq_n_u8(63));
          } else {
            uint8x16_t both = bytes(256, block + 4);
            scale = vorrq_u8(vandq_u8(both, vdupq_n_u8(15)), vshlq_n_u8(vshrq_n_u8(bytes(256, block - 4), 6), 4));
            least = vorrq_u8(vshrq_n_u8(both, 4), vshlq_n_u8(vshrq_n_u8(bytes(256, block), 6), 4));
          }
          put_scales(with_signs(scale), at + 2 * c, room + c);
          put_scales(with_signs(least), at + 128 + 2 * c, room + PANEL + c);
        }
      }
      return room;
    }
  }
};

struct OfType {
  const FewWords* words;
  int factor;
};
template <GgmlType TYPE>
constexpr OfType of_type = {few_words_of<OfGgml<TYPE>>, OfGgml<TYPE>::FACTOR};
constexpr OfType of_types[GGML_TYPES] = {of_type<GgmlType::q4_0>, of_type<GgmlType::q5_0>, of_type<GgmlType::q8_0>,
                                         of_type<GgmlType::q4_k>, of_type<GgmlType::q5_k>, of_type<GgmlType::q6_k>};

#ifdef BYTE_ROWS
constexpr auto row_to_ggml_words = row_to_few;
#else
void row_to_ggml_words(const bf16* x, int size, const ByteRows& to, int row) {
  char* sums = reinterpret_cast<char*>(to.data + 2 * row * to.stride) + word_bytes(size);
  int32_t sum = 0;
  row_to_words(x, size, to, row, [&](int i, int16x8_t words) {
    sum = i % GGML_SUMS ? sum + vaddlvq_s16(words) : vaddlvq_s16(words);
    if (i % GGML_SUMS) memcpy(sums + i / GGML_SUMS * 4, &sum, 4);
  });
}
#endif

void gemm_ggml_words(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next) {
  const OfType& type = of_types[int(panel.type)];
  gemm_few_words(a, rows, type.words, panel.blocks, ggml_shape(panel.type).blocks(), type.factor, panel.data, sum);
}

// The set with these too.
Isa with_ggml(Isa made) {
  made.to_ggml = row_to_ggml_words, made.gemm_ggml = gemm_ggml_words;
  return made;
}

}  // namespace
