// Products of rows in 8 bits with codes of 4 to 8 bits (int4.h, ggml.h, int8.h), for AVX2. Every 32 inputs of a row have a scale of
// their own, as llama.cpp's Q8_0 has: codes are bytes after an instruction or a few for 32 of them, and VPMADDUBSW multiplies
// those by a row's bytes (VPDPBUSD with AVX-VNNI). Sums of a block, or of half of it, are exact, so both have the same bits.
//
// A row lies at data + 2 r * stride of a ByteRows: its bytes, in the order of a line's codes, and then a RowBlock for every 32.
#pragma once
#include "int8_loops.h"
#include "words_avx2.h"

namespace {

constexpr int MOST_BYTE = 127;
constexpr float WHOLE_ONE = 12582912.0f;  // 1.5 x 2^23: to its bits a whole number is added as it is to the float
constexpr int32_t WHOLE_ONE_BITS = 0x4b400000;
constexpr int CODE_ROWS = 8;    // their sums of a vector are half of the registers
constexpr int CODE_SLICE = 32;  // rows whose sums stay in the nearest cache

struct RowBlock {
  int32_t sum[2];  // of each sixteen bytes
  float scale;
};

INLINE const RowBlock* row_blocks(const int8_t* row, int inputs) {
  return reinterpret_cast<const RowBlock*>(row + words_of_inputs(inputs));
}

// 32 bytes to `to`, their order in every eight 0 4 1 5 2 6 3 7 unless `plain`, and both sums.
template <bool PLAIN>
INLINE void block_to_bytes(__m256i first, __m256i second, float factor, int8_t* to, int32_t (&sum)[2]) {
  auto sixteen_words = [&](__m256i narrow) {
    return _mm256_packs_epi32(numbers_of(_mm256_castsi256_si128(narrow), factor),
                              numbers_of(_mm256_extracti128_si256(narrow, 1), factor));
  };
  __m256i bytes = _mm256_packs_epi16(sixteen_words(first), sixteen_words(second));
  __m128i lower = _mm256_castsi256_si128(bytes), upper = _mm256_extracti128_si256(bytes, 1);
  auto* half = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(half, PLAIN ? _mm_unpacklo_epi32(lower, upper) : _mm_unpacklo_epi8(lower, upper));
  _mm_storeu_si128(half + 1, PLAIN ? _mm_unpackhi_epi32(lower, upper) : _mm_unpackhi_epi8(lower, upper));
  __m256i four = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1));
  sum[0] = _mm_cvtsi128_si32(sums), sum[1] = _mm_extract_epi32(sums, 2);
}

template <bool PLAIN>
void row_to_code_bytes(const bf16* x, int size, const ByteRows& to, int row) {
  auto* bytes = reinterpret_cast<int8_t*>(to.data + 2 * row * to.stride);
  auto* of = const_cast<RowBlock*>(row_blocks(bytes, size));
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  for (int i = 0, all = int(words_of_inputs(size)); i < all; i += BLOCK, bytes += BLOCK, of++) {
    __m256i first = sixteen(x + i, size - i), second = sixteen(x + i + 16, size - i - 16);
    __m256i most = _mm256_max_epu16(_mm256_and_si256(first, magnitude), _mm256_and_si256(second, magnitude));
    unsigned bits = most_of_sixteen(most) << 16;
    float top;
    memcpy(&top, &bits, 4);
    bool finite = bits < 0x7f800000u, some = finite && top > WORD_LEAST_ROW;
    if (!some) first = second = _mm256_setzero_si256();
    of->scale = finite ? top / MOST_BYTE : NAN;
    block_to_bytes<PLAIN>(first, second, some ? MOST_BYTE / top : 0.0f, bytes, of->sum);
  }
}

INLINE __m256i bytes_at(const char* at) { return _mm256_loadu_si256((const __m256i*)at); }
INLINE __m256 halves_at(const char* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }

enum class Scale { bf16, f32, f16 };

// One scale for a group's inputs of a column.
struct GroupScales {
  static constexpr int parts = 1;  // of a block, each with scales of its own
  static constexpr bool minima = false;
  const char* at;
  Scale kind;

  static size_t bytes(Scale kind) { return PANEL * (kind == Scale::f32 ? 4 : 2); }
  INLINE __m256 step(int, int, int column) const {
    if (kind == Scale::f32) return _mm256_loadu_ps((const float*)at + column);
    if (kind == Scale::f16) return halves_at(at + column * 2);
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(at + column * 2)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
};

// One scale for all inputs of a column, with which its sums are multiplied at last.
struct ColumnScales {
  static constexpr int parts = 1;
  static constexpr bool minima = false;
  INLINE __m256 step(int, int, int) const { return _mm256_set1_ps(1.0f); }
};

// Codes from 0 on, OFFSET above their numbers; or, `PLAIN`, numbers as they are.
template <int BITS, int OFFSET, class SCALES, bool E2M1 = false, bool PLAIN = false>
struct Codes {
  using Scales = SCALES;
  static constexpr int bits = BITS, tile_bytes = 64 * BITS, line_bytes = BITS == 8 ? 128 : 64;
  static constexpr bool e2m1 = E2M1, plain = PLAIN;
#ifdef HAS_VNNI
  static constexpr bool with_signs = false;
#else
  static constexpr bool with_signs = BITS == 8;  // the sum of two products of 255 and 127 has no room in 16 bits
#endif
  static constexpr int offset = with_signs ? 0 : OFFSET;
};
using Int4Codes = Codes<4, 8, GroupScales>;
using E2m1Codes = Codes<4, 12, GroupScales, true>;
using Int8Codes = Codes<8, 128, ColumnScales, false, true>;

// Of a line, the codes of eight columns as bytes: inputs 0 4 1 5, and 2 6 3 7. `above`: bits of this line and of later ones.
template <class C>
INLINE void numbers_of_line(const char* line, __m256i& above, __m256i (&number)[2]) {
  if constexpr (C::bits == 8) {
    const __m256i turned = _mm256_set1_epi8(C::with_signs != C::plain ? -128 : 0);
    number[0] = _mm256_xor_si256(bytes_at(line), turned), number[1] = _mm256_xor_si256(bytes_at(line + 64), turned);
    return;
  }
  const __m256i codes = bytes_at(line), low = _mm256_set1_epi8(15);
  number[0] = _mm256_and_si256(codes, low), number[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
  if constexpr (C::e2m1) {
    __m128i twice = _mm_add_epi8(_mm_loadu_si128((const __m128i*)E2M1_TWICE), _mm_set1_epi8(12));
    for (int i = 0; i < 2; i++) number[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(twice), number[i]);
  }
  if constexpr (C::bits > 4) {
    constexpr int own = C::bits - 4;
    const __m256i mask = _mm256_set1_epi8(own == 1 ? 16 : 48);
    number[0] = _mm256_or_si256(number[0], _mm256_and_si256(_mm256_slli_epi16(above, 4), mask));
    number[1] = _mm256_or_si256(number[1], _mm256_and_si256(_mm256_slli_epi16(above, 4 - own), mask));
    above = _mm256_srli_epi16(above, 2 * own);
  }
}

INLINE __m256i four_bytes(const int8_t* x) {
  int four;
  memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// total + the products of eight codes of a column with a row's bytes.
template <class C>
INLINE __m256i plus_codes(__m256i total, const __m256i (&number)[2], const int8_t* x) {
#ifdef HAS_VNNI
  return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(total, number[0], four_bytes(x)), number[1], four_bytes(x + 4));
#endif
  const __m256i one = _mm256_set1_epi16(1);
  __m256i pairs[2];
  for (int i = 0; i < 2; i++) {
    __m256i four = four_bytes(x + 4 * i), size = C::with_signs ? _mm256_abs_epi8(number[i]) : number[i];
    pairs[i] = _mm256_maddubs_epi16(size, C::with_signs ? _mm256_sign_epi8(four, number[i]) : four);
  }
  if (!C::with_signs) return _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_add_epi16(pairs[0], pairs[1]), one));
  return _mm256_add_epi32(total, _mm256_add_epi32(_mm256_madd_epi16(pairs[0], one), _mm256_madd_epi16(pairs[1], one)));
}

// A block of R rows, `step` bytes apart: what their sums begin with, and what those are worth.
template <int R, class C>
struct BlockRows {
  static constexpr int parts = C::Scales::parts;
  const int8_t* data;
  size_t step;
  int32_t start[parts][R];
  float scale[R], own[R];  // `own`: the sum of its numbers

  INLINE BlockRows(const ByteRows& a, int row, int blocks, int b) : step(2 * a.stride) {
    data = reinterpret_cast<const int8_t*>(a.data + row * step);
    const char* of_row = reinterpret_cast<const char*>(row_blocks(data, blocks * BLOCK) + b);
    data += b * BLOCK;
    for (int r = 0; r < R; r++, of_row += step) {
      const auto& of = *reinterpret_cast<const RowBlock*>(of_row);
      scale[r] = of.scale, own[r] = of.scale * float(of.sum[0] + of.sum[1]);
      for (int p = 0; p < parts; p++) start[p][r] = WHOLE_ONE_BITS - C::offset * (parts == 2 ? of.sum[p] : of.sum[0] + of.sum[1]);
    }
  }
};

// V vectors of eight columns of a tile of a group's block; `at` is where its first vector is.
template <int R, int V, class C>
INLINE void add_vectors(const BlockRows<R, C>& rows, const char* at, const typename C::Scales& scales, int block, float* sum, int column) {
  constexpr int parts = C::Scales::parts, lines = 4 / parts;
  const int8_t* a = rows.data;
  const char* line = at;
#pragma GCC unroll 1
  for (int p = 0; p < parts; p++) {
    __m256i total[V][R], above[V];
    for (int v = 0; v < V; v++) above[v] = C::bits == 5 || C::bits == 6 ? bytes_at(at + 256 + p * 64 + v * 32) : __m256i{};
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) total[v][r] = _mm256_set1_epi32(rows.start[p][r]);
#pragma GCC unroll 1
    for (int l = 0; l < lines; l++, line += C::line_bytes, a += 8) {
      __m256i number[V][2];
      for (int v = 0; v < V; v++) numbers_of_line<C>(line + v * 32, above[v], number[v]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[v][r] = plus_codes<C>(total[v][r], number[v], a + r * rows.step);
    }
    for (int v = 0; v < V; v++) {
      const __m256 step = scales.step(block, p, column + v * 8), one = _mm256_set1_ps(WHOLE_ONE);
      __m256 least{};
      if constexpr (C::Scales::minima) least = scales.least(block, column + v * 8);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        float* to = sum + r * PANEL + column + v * 8;
        __m256 both = _mm256_mul_ps(step, _mm256_set1_ps(rows.scale[r]));
        __m256 made = _mm256_fmadd_ps(_mm256_sub_ps(_mm256_castsi256_ps(total[v][r]), one), both, _mm256_loadu_ps(to));
        if (C::Scales::minima) made = _mm256_fnmadd_ps(_mm256_set1_ps(rows.own[r]), least, made);
        _mm256_storeu_ps(to, made);
      }
    }
  }
}

struct CodesPanel {
  const char* data;
  int blocks, group;
  Scale kind;
};

// sum[R][64] += the products of blocks b .. end - 1, which are one group; `at` is behind its scales. Few rows' sums of both
// vectors of a tile fit into registers beside what both read of rows.
template <int R, class C>
NOINLINE void add_group(const ByteRows& a, int row, int blocks, int b, int end, const char* at, const typename C::Scales& scales,
                        float* sum, const WordsAhead& ahead) {
  constexpr int together = R <= 3 ? 2 : 1;
  for (int i = 0; b < end; b++, i++) {
    const BlockRows<R, C> rows(a, row, blocks, b);
    for (int t = 0; t < 4; t++, at += C::tile_bytes) {
      const char* early = ahead.of(at);
      for (int l = 0; l < C::tile_bytes; l += 64) _mm_prefetch(early + l, _MM_HINT_T0);
#pragma GCC unroll 1
      for (int v = 0; v < 2; v += together) add_vectors<R, together, C>(rows, at + v * 32, scales, i, sum, t * 16 + v * 8);
    }
  }
}

template <class C>
constexpr decltype(&add_group<1, C>) add_group_of[] = {
    nullptr,         add_group<1, C>, add_group<2, C>, add_group<3, C>,        add_group<4, C>,
    add_group<5, C>, add_group<6, C>, add_group<7, C>, add_group<CODE_ROWS, C>};

template <class C>
void gemm_codes(const ByteRows& a, int rows, const CodesPanel& panel, float* sum, Next next) {
  const size_t scale_bytes = C::Scales::bytes(panel.kind), groups = (panel.blocks + panel.group - 1) / panel.group;
  WordsAhead ahead{panel.data + groups * scale_bytes + size_t(panel.blocks) * 4 * C::tile_bytes, next.data};
  memset(sum, 0, size_t(rows) * PANEL * sizeof(float));
  for (int first = 0; first < rows; first += CODE_SLICE) {
    const char* at = panel.data;
    for (int b = 0, end; b < panel.blocks; at += size_t(end - b) * 4 * C::tile_bytes, b = end) {
      end = panel.blocks - b < panel.group ? panel.blocks : b + panel.group;
      const typename C::Scales scales{at, panel.kind};
      const char* early = ahead.of(at);
      for (size_t i = 0; i < scale_bytes; i += 64) _mm_prefetch(early + i, _MM_HINT_T0);
      at += scale_bytes;
      in_word_groups(rows - first < CODE_SLICE ? rows - first : CODE_SLICE, CODE_ROWS, [&](int r, int some) {
        add_group_of<C>[some](a, first + r, panel.blocks, b, end, at, scales, sum + (first + r) * PANEL, ahead);
      });
    }
  }
}

// sum[R][64] += the products of so many blocks of int8 weights, without their scales; each has two blocks of a row.
template <int R>
NOINLINE void add_int8(const ByteRows& a, int row, const Int8Panel& panel, int b, int end, float* sum, const WordsAhead& ahead) {
  constexpr int together = R <= 3 ? 2 : 1, half_tile = INT8_TILE / 2;
  const char* at = reinterpret_cast<const char*>(panel.data) + size_t(b) * INT8_BLOCK;
  for (; b < end; b++) {
    const BlockRows<R, Int8Codes> half[2] = {{a, row, 2 * panel.blocks, 2 * b}, {a, row, 2 * panel.blocks, 2 * b + 1}};
    for (int t = 0; t < 4; t++)
#pragma GCC unroll 1
      for (int h = 0; h < 2; h++, at += half_tile) {
        const char* early = ahead.of(at);
        for (int l = 0; l < half_tile; l += 64) _mm_prefetch(early + l, _MM_HINT_T0);
#pragma GCC unroll 1
        for (int v = 0; v < 2; v += together) add_vectors<R, together, Int8Codes>(half[h], at + v * 32, {}, 0, sum, t * 16 + v * 8);
      }
  }
}

constexpr decltype(&add_int8<1>) add_int8_of[] = {nullptr,     add_int8<1>, add_int8<2>, add_int8<3>,        add_int8<4>,
                                                  add_int8<5>, add_int8<6>, add_int8<7>, add_int8<CODE_ROWS>};

void gemm_int8_bytes(const ByteRows& a, int rows, const Int8Panel& panel, float* sum, Next next) {
  constexpr int chunk = 2;  // blocks that several groups of rows take in turn
  WordsAhead ahead{reinterpret_cast<const char*>(panel.data) + size_t(panel.blocks) * INT8_BLOCK, next.data};
  memset(sum, 0, size_t(rows) * PANEL * sizeof(float));
  const int step = rows <= CODE_ROWS ? panel.blocks : chunk;
  for (int b = 0; b < panel.blocks; b += step)
    in_word_groups(rows, CODE_ROWS, [&](int r, int some) {
      add_int8_of[some](a, r, panel, b, std::min(b + step, panel.blocks), sum + r * PANEL, ahead);
    });
  scale_columns(sum, rows, panel.scale);
}

void gemm_int4_bytes(const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next next) {
  CodesPanel codes{panel.data, panel.blocks, panel.group, panel.wide ? Scale::f32 : Scale::bf16};
  return (panel.e2m1 ? gemm_codes<E2m1Codes> : gemm_codes<Int4Codes>)(a, rows, codes, sum, next);
}

}  // namespace
