// Products of rows (rows_neon.h) with int8 and int4 weights, for Arm. Sums of a block are exact and are added in float in ascending
// order of blocks, so a row's bits depend on no batch, nor, where it has 16 bits, on which instruction there is.
#pragma once
#include <arm_neon.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "int4.h"
#include "int8.h"
#include "rows_neon.h"
#include "vec.h"

namespace {

constexpr int WORD_ROWS = 4;           // of a pass
constexpr int WORD_CHUNK = 16 << 10;   // bytes of weights that several passes take in turn
constexpr int WORD_STRETCH = 8;        // blocks of a pass, or a group if that has more
constexpr int WORD_LINES = BLOCK / 8;       // of four columns of a block

// How weights of few bits lie and what their bytes are. A number that is multiplied is FACTOR times that which is meant.
template <bool E2M1, bool WIDE>
struct Int4 {
  using Scale = std::conditional_t<WIDE, float, bf16>;
  static constexpr int BITS = 4, FACTOR = E2M1 ? 1 : 16, SCALE_BYTES = PANEL * int(sizeof(Scale)), PARTS = 1;
  static constexpr bool MINIMA = false;

  // Line V of what is kept of four columns.
  template <int V, class S>
  static INLINE auto numbers(const S& stored) {
    auto codes = stored[V / 2];
    if constexpr (E2M1 && V % 2) return doubled_e2m1(down<4>(codes));
    else if constexpr (E2M1) return doubled_e2m1(masked(codes, 15));
    else if constexpr (V % 2) return masked(codes, 0xf0);
    else return up<4>(codes);
  }
  // Scales of a block's parts, 64 each, and of what comes off: those that lie there, or `room`, for columns first .. end - 1.
  static INLINE const Scale* scales(const char* at, int, int, int, float*) { return (const Scale*)at; }
};

// Calls work(0), work(1) .. with constants: what they index stays in registers.
template <class Work, int... I>
INLINE void each_of(const Work& work, std::integer_sequence<int, I...>) {
  (work(std::integral_constant<int, I>()), ...);
}
template <int N, class Work>
INLINE void each(const Work& work) {
  each_of(work, std::make_integer_sequence<int, N>());
}

// `to` plus the products of four columns of a block with one row.
template <class Format>
INLINE float32x4_t plus_four(float32x4_t to, const Line (&w)[WORD_LINES], const FewInputs<Format::MINIMA>& row, float32x4_t scale,
                             float32x4_t second) {
  float32x4_t made = vfmaq_f32(to, products<0, WORD_LINES / Format::PARTS>(w, row.x), row.scaled(scale));
  if (Format::PARTS == 2) made = vfmaq_f32(made, products<WORD_LINES / 2, WORD_LINES>(w, row.x), row.scaled(second));
  return Format::MINIMA ? vfmsq_n_f32(made, second, row.sum) : made;
}

// Eight columns of a block: put(four columns, of which four, their scales).
template <class Format, class Put>
INLINE void eight_columns(const char*& at, const typename Format::Scale* scale, const Put& put) {
  EightScales first = eight_scales(scale), second = Format::PARTS == 2 || Format::MINIMA ? eight_scales(scale + PANEL) : first;
  each<2>([&](auto quad) {
    constexpr int q = decltype(quad)::value;
    const Stored<Format::BITS> stored = next_stored<Format::BITS>(at);
    const Line w[WORD_LINES] = {Format::template numbers<0>(stored), Format::template numbers<1>(stored),
                                Format::template numbers<2>(stored), Format::template numbers<3>(stored)};
    put(w, quad, first.at[q], second.at[q]);
  });
}

// sum[R][64] += the products of blocks block .. end - 1, which begin a group. Returns where the next block or group lies.
template <class Format, int R>
NOINLINE const char* few_words(const FewRows& rows, int block, int end, int group, const char* at, float* sum) {
  alignas(64) float room[2 * PANEL];
  const char* scales = at;
  for (int left = 0; block < end; block++, left--) {
    if (left == 0) left = group, scales = at, at += Format::SCALE_BYTES;
    auto scale = Format::scales(scales, group - left, 0, PANEL, room);
    FewInputs<Format::MINIMA> x[R];
    for (int r = 0; r < R; r++) x[r] = {rows, r, block};
    float* to = sum;
    for (int c = 0; c < PANEL; c += R == 1 ? 16 : 8)
      each<R == 1 ? 2 : 1>([&](auto) {
        eight_columns<Format>(at, scale, [&](auto& w, auto q, float32x4_t first, float32x4_t second) {
          each<R>([&](auto r) {
            float* there = to + r * PANEL + 4 * q;
            vst1q_f32(there, plus_four<Format>(vld1q_f32(there), w, x[r], first, second));
          });
        });
        to += 8, scale += 8;
      });
  }
  return at;
}

INLINE int word_stretch(int group) { return std::max(group, WORD_STRETCH / group * group); }

// The same for int8 weights, without any scale.
template <int R>
NOINLINE void int8_words(const int8_t* a, size_t stride, const char* at, int blocks, float* sum) {
  constexpr int lines = INT8_INPUTS / 8;
  for (int b = 0; b < blocks; b++, a += 2 * INT8_INPUTS) {
    Inputs<lines> x[R];
    for (int r = 0; r < R; r++) x[r] = Inputs<lines>(a + r * stride);
#pragma GCC unroll 2
    for (int c = 0; c < PANEL; c += 4) {
      const Line w[lines] = {next_line(at), next_line(at), next_line(at), next_line(at),
                             next_line(at), next_line(at), next_line(at), next_line(at)};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        float* to = sum + r * PANEL + c;
        vst1q_f32(to, vaddq_f32(vld1q_f32(to), products<0, lines>(w, x[r])));
      }
    }
  }
}

#ifdef HAS_SVE
void int8_row(const int8_t* a, size_t stride, const char* at, int blocks, float* sum);  // loops_sve.h
template <class Format>
const char* row_words(const FewRows& rows, int block, int end, int group, const char* at, float* sum);
#else
constexpr auto int8_row = int8_words<1>;
template <class Format>
constexpr auto row_words = few_words<Format, 1>;
#endif

constexpr decltype(&int8_words<2>) int8_words_of[] = {nullptr, int8_row, int8_words<2>, int8_words<3>, int8_words<4>};
using FewWords = decltype(&few_words<Int4<false, false>, 2>);
template <class Format>
constexpr FewWords few_words_of[] = {nullptr, row_words<Format>, few_words<Format, 2>, few_words<Format, 3>, few_words<Format, 4>};

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
      int8_words_of[some](words_of(a, r) + b * 2 * INT8_INPUTS, 2 * a.stride, (const char*)panel.data + size_t(b) * INT8_BLOCK, n,
                          sum + r * PANEL);
    });
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) {
      float* to = sum + r * PANEL + c;
      store(to, load(to) * (load(panel.scale + c) * splat(a.scale[r])));
    }
}

// Of a panel of `blocks`, whose groups have so many, and numbers as often as `factor` says too large.
void gemm_few_words(const ByteRows& a, int rows, const FewWords* words, int blocks, int group, int factor, const char* at, float* sum) {
  int step = rows <= WORD_ROWS ? blocks : word_stretch(group);
  const char* then = at;
  memset(sum, 0, size_t(rows) * PANEL * sizeof(float));
  for (int b = 0; b < blocks; b += step, at = then)
    in_word_groups(rows, [&](int r, int some) {
      const int8_t* row = words_of(a, r);
      FewRows given{row, 2 * a.stride, reinterpret_cast<const char*>(row) + few_bytes(blocks * BLOCK)};
      then = words[some](given, b, std::min(blocks, b + step), group, at, sum + r * PANEL);
    });
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES)
      store(sum + r * PANEL + c, load(sum + r * PANEL + c) * (a.scale[r] / float(factor)));
}

template <bool E2M1>
INLINE void gemm_int4_words(const ByteRows& a, int rows, const Int4Panel& panel, float* sum) {
  const FewWords* words = panel.wide ? few_words_of<Int4<E2M1, true>> : few_words_of<Int4<E2M1, false>>;
  gemm_few_words(a, rows, words, panel.blocks, panel.group, Int4<E2M1, true>::FACTOR, panel.data, sum);
}

// The set with these for weights in 8 and 4 bits.
Isa with_words(Isa made) {
  made.to_bytes = row_to_plain_words, made.to_words = row_to_few;
  made.gemm_bytes = gemm_int8_words;
  made.gemm_words = [](const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next) {
    panel.e2m1 ? gemm_int4_words<true>(a, rows, panel, sum) : gemm_int4_words<false>(a, rows, panel, sum);
  };
  return made;
}

}  // namespace
