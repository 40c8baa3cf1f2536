// Products with codes of a cache for processors with AVX-512 VNNI.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#include <immintrin.h>
#include <math.h>

#include <algorithm>
#include <type_traits>

#include "codes_avx512.h"
#include "isa.h"

namespace {

constexpr int MOST_ROWS = 6;        // of a pass: 24 of the 32 registers are sums

// Calls work(first row, rows as a constant) for all rows, in as few passes as there are and all alike.
template <class Work>
INLINE void in_passes(int rows, const Work& work) {
  const int passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int i = 0, r = 0; i < passes; i++) {
    const int n = (rows - r) / (passes - i);
    switch (n) {
      case 1: work(r, std::integral_constant<int, 1>()); break;
      case 2: work(r, std::integral_constant<int, 2>()); break;
      case 3: work(r, std::integral_constant<int, 3>()); break;
      case 4: work(r, std::integral_constant<int, 4>()); break;
      case 5: work(r, std::integral_constant<int, 5>()); break;
      case 6: work(r, std::integral_constant<int, 6>()); break;
    }
    r += n;
  }
}

// sum += the products of bytes, of which the first have no sign, by fours. As an intrinsic GCC would move every sum twice.
INLINE __m512i add_fours(__m512i sum, __m512i first, __m512i second) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(first), "v"(second));
  return sum;
}

// Whole numbers of 16 bits are two products: of their high bytes, 256 times as much, and of their low ones.
template <int R>
INLINE void eight_up(__m512i (&total)[R][4]) {
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) total[r][t] = _mm512_slli_epi32(total[r][t], 8);
}

// Sixteen tokens' codes 128 up, which makes them no less than 0: of each sixteen codes four vectors, and of vector g lane l is
// token 4 l + g.
INLINE void take_keys(const uint8_t* code, size_t stride, int size, __m512i* key) {
  const __m512i up = _mm512_set1_epi8(char(0x80));
  for (int c = 0; c < size; c += 16, code += 16, key += 4)
    for (int g = 0; g < 4; g++) {
      const uint8_t* at = code + g * stride;
      __m512i four = _mm512_castsi128_si512(load_raw<__m128i>(at));
      four = _mm512_inserti32x4(four, load_raw<__m128i>(at + 4 * stride), 1);
      four = _mm512_inserti32x4(four, load_raw<__m128i>(at + 8 * stride), 2);
      four = _mm512_inserti32x4(four, load_raw<__m128i>(at + 12 * stride), 3);
      key[g] = _mm512_xor_si512(four, up);
    }
}

// The bytes of R rows of queries, `step` apart, times sixteen tokens' codes.
template <int R>
INLINE void add_scores(const char* query, size_t step, const __m512i* key, const __m512i* end, __m512i (&total)[R][4]) {
  do {  // as a `for` loop, GCC would move all sums about
    for (int r = 0; r < R; r++) {
      __m512i q = _mm512_broadcast_i32x4(load_raw<__m128i>(query + r * step));
      for (int g = 0; g < 4; g++) total[r][g] = add_fours(total[r][g], key[g], q);
    }
    query += 16, key += 4;
  } while (key != end);
}

// Four parts of each token's sum, as take_keys has tokens, become sums in the order of tokens.
INLINE __m512i joined(const __m512i (&part)[4]) {
  __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(part[0], part[1]), _mm512_unpackhi_epi32(part[0], part[1]));
  __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(part[2], part[3]), _mm512_unpackhi_epi32(part[2], part[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// One tile's codes first .. end - 1, which have the same scales, and of each row what codes of 128 would add.
struct CodePart {
  int first, end;
  const int32_t* up;
  __m512 scale;
};

template <int R>
NOINLINE void score_rows(const CodeQueries& q, int row, int size, const __m512i* key, const CodePart& part, bool add, float* score,
                         size_t stride) {
  __m512i total[R][4] = {};
  const char* high = reinterpret_cast<const char*>(q.word) + size_t(2) * size * row + part.first;
  const __m512i* end = key + part.end / 4;
  key += part.first / 4;
  add_scores<R>(high, 2 * size, key, end, total);
  eight_up(total);
  add_scores<R>(high + size, 2 * size, key, end, total);
  for (int r = 0; r < R; r++) {
    __m512i sum = _mm512_sub_epi32(joined(total[r]), _mm512_set1_epi32(part.up[row + r]));
    __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(q.scale[row + r])), part.scale);
    float* to = score + (row + r) * stride;
    _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), scaled) : scaled);
  }
}

// What `count` codes of 128 add to a row's scores.
INLINE int32_t sum_of_128(const char* high, int size, int count) {
  const __m512i each = _mm512_set1_epi8(char(0x80));
  __m512i sum[2] = {};
  for (int half = 0; half < 2; half++)
    for (int c = 0; c < count; c += 64) {
      __mmask64 there = count - c < 64 ? (1ull << (count - c)) - 1 : ~0ull;
      sum[half] = _mm512_dpbusd_epi32(sum[half], each, _mm512_maskz_loadu_epi8(there, high + half * size + c));
    }
  return int32_t(uint32_t(_mm512_reduce_add_epi32(sum[0])) * 256u + uint32_t(_mm512_reduce_add_epi32(sum[1])));
}

// The bytes of R rows of weights, `step` apart, times values.
template <int R>
INLINE void add_products(const uint8_t* weight, size_t step, const __m512i* value, const __m512i* end, __m512i (&total)[R][4]) {
  do {
    for (int r = 0; r < R; r++) {
      int32_t four;
      memcpy(&four, weight + r * step, 4);
      __m512i w = _mm512_set1_epi32(four);
      for (int v = 0; v < 4; v++) total[r][v] = add_fours(total[r][v], w, value[v]);
    }
    weight += 4, value += 4;
  } while (value != end);
}

template <int R>
NOINLINE void value_rows(const uint8_t* high, size_t step, const float* worth, const __m512i* value, const __m512i* end, float* sum) {
  __m512i total[R][4] = {};
  add_products<R>(high, step, value, end, total);
  eight_up(total);
  add_products<R>(high + step / 2, step, value, end, total);
  for (int r = 0; r < R; r++) add_columns(total[r], worth[r], sum + r * PANEL);
}

}  // namespace

void to_codes_vnni(const bf16* q, int size, int row, const CodeQueries& to) {
  const float factor = whole_factor(q, size, to.scale + row);
  int8_t *high = reinterpret_cast<int8_t*>(to.word) + size_t(2) * size * row, *low = high + size;
  for (int i = 0; i < size; i++) {
    int whole = factor ? int(lrintf(to_float(q[i]) * factor)) : 0;
    low[i] = int8_t(whole), high[i] = int8_t((whole - low[i]) / 256);
  }
}

void score_codes_vnni(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const CodeScales& scale,
                      float* score, size_t row, size_t step) {
  alignas(64) __m512i key[MOST_CODES / 4];
  int32_t up[2][NEAR_ROWS];
  for (int begin = 0; begin < q.rows; begin += NEAR_ROWS) {
    const CodeQueries some{q.word + size_t(size) / 2 * begin, q.scale + begin, std::min(q.rows - begin, NEAR_ROWS)};
    for (int r = 0; r < some.rows; r++) {
      const char* high = reinterpret_cast<const char*>(some.word) + size_t(2) * size * r;
      up[0][r] = sum_of_128(high, size, scale.count), up[1][r] = sum_of_128(high + scale.count, size, size - scale.count);
    }
    for (int t = 0; t < tiles; t++) {
      take_keys(code[t], stride, size, key);
      const int at = t * TILE_TOKENS;
      const CodePart first{0, scale.count, up[0], _mm512_loadu_ps(scale.first + at)};
      const CodePart others{scale.count, size, up[1], _mm512_loadu_ps(scale.others + at)};
      float* to = score + t / 4 * step + t % 4 * TILE_TOKENS + begin * row;
      in_passes(some.rows, [&](int r, auto n) {
        score_rows<n>(some, r, size, key, first, false, to, row);
        if (others.first < size) score_rows<n>(some, r, size, key, others, true, to, row);
      });
    }
  }
}

void add_codes_vnni(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                    const float* scale, float* sum, size_t panel_step) {
  Window<NEAR_ROWS> w;
  for (int begin = 0; begin < rows; begin += NEAR_ROWS, weights += NEAR_ROWS * stride, sum += NEAR_ROWS * PANEL) {
    const int some = std::min(rows - begin, NEAR_ROWS);
    w.take_weights(weights, stride, some, scale, tiles);
    for (int first = 0; first < size; first += PANEL) {
      w.take_values(code, tiles, code_stride, first, size);
      float* to = sum + first / PANEL * panel_step;
      in_passes(some, [&](int r, auto n) {
        value_rows<n>(w.high[r], sizeof w.high[r], w.worth + r, w.value, w.value + tiles * TILE_TOKENS, to + r * PANEL);
      });
    }
  }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
