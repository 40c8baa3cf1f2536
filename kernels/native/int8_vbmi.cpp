// Few rows times int8 weights, for processors with AVX-512 BF16 and VBMI: a byte's magnitude is looked up among 128.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#define HAS_BF16_CONVERSION
#include <immintrin.h>

#include "isa.h"
#include "vec.h"

namespace {

constexpr int LINE = 32;          // weights: a line of bf16, half a line of int8
constexpr int AHEAD_BLOCKS = 3;   // what is asked for early: 6 KiB
constexpr int CHUNK_BLOCKS = 4;   // what several passes over the same weights take at a time
constexpr int PASS_ROWS = 6, FEW_ROWS = 24;

// Whole numbers up to 127 as bf16, their high and their low bytes.
struct Numbers {
  alignas(64) uint8_t high[128], low[128];
  Numbers() {
    for (int n = 0; n < 128; n++) {
      float number = float(n);
      uint32_t bits;
      memcpy(&bits, &number, sizeof(bits));
      high[n] = uint8_t(bits >> 24);
      low[n] = uint8_t(bits >> 16);
    }
  }
};

// 64 weights as two lines of bf16. They are -127 .. 127: packing divides by the largest magnitude over 127.
class Widen {
 public:
  Widen() {
    static const Numbers numbers;
    for (int i = 0; i < 2; i++) {
      high_[i] = _mm512_load_si512(numbers.high + i * 64);
      low_[i] = _mm512_load_si512(numbers.low + i * 64);
    }
  }

  INLINE void operator()(const int8_t* from, __m512i (&line)[2]) const {
    // Unpacking goes by lanes of 16 bytes: the first half of each must be the first line's.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i w = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
    __m512i size = _mm512_abs_epi8(w);
    __m512i low = _mm512_permutex2var_epi8(low_[0], size, low_[1]);
    __m512i high = _mm512_permutex2var_epi8(high_[0], size, high_[1]);
    high = _mm512_ternarylogic_epi32(high, w, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (w & 0x80)
    line[0] = _mm512_unpacklo_epi8(low, high);
    line[1] = _mm512_unpackhi_epi8(low, high);
  }

 private:
  __m512i high_[2], low_[2];
};

// As compact_avx512bf16.h does it. (One template over both kinds of weights made that one 8 % slower, with GCC 12.)
template <int R>
void rows_i8(const bf16* a, size_t stride, const int8_t* at, int blocks, const Widen& widen, float* sum, bool add,
             const int8_t* after) {
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) total[r][t] = add ? _mm512_loadu_ps(sum + r * PANEL + t * 16) : _mm512_setzero_ps();
  for (int b = 0; b < blocks; b++, a += BLOCK, at += PANEL_BLOCK) {
    int later = b + AHEAD_BLOCKS;
    const int8_t* ahead = later < blocks ? at + AHEAD_BLOCKS * PANEL_BLOCK : after + (later - blocks) * PANEL_BLOCK;
#pragma GCC unroll 2
    for (int t = 0; t < 4; t += 2) {
      for (int p = 0; p < BLOCK / 2; p += 2, ahead += 128) {
        __m512i line[2][2];
        for (int i = 0; i < 2; i++) widen(at + (t + i) * TILE + p * LINE, line[i]);
        for (int i = 0; i < 128; i += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T1);
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++)
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) {
            int pair;
            memcpy(&pair, a + r * stride + (p + j) * 2, 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            for (int i = 0; i < 2; i++) total[r][t + i] = _mm512_dpbf16_ps(total[r][t + i], x, (__m512bh)line[i][j]);
          }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) _mm512_storeu_ps(sum + r * PANEL + t * 16, total[r][t]);
}

}  // namespace

bool int8_few_rows(const bf16* a, size_t stride, int rows, const int8_t* panel, int blocks, float* sum, const char* after) {
  if (rows > FEW_ROWS) return false;
  const Widen widen;
  int passes = (rows + PASS_ROWS - 1) / PASS_ROWS, together = (rows + passes - 1) / passes;
  int chunk = passes == 1 ? blocks : CHUNK_BLOCKS;
  for (int b = 0; b < blocks; b += chunk) {
    int n = blocks - b < chunk ? blocks - b : chunk;
    const int8_t* at = panel + size_t(b) * PANEL_BLOCK;
    const int8_t* next = b + n < blocks ? at + size_t(n) * PANEL_BLOCK : reinterpret_cast<const int8_t*>(after);
    for (int r = 0; r < rows; r += together) {
      const bf16* x = a + r * stride + b * BLOCK;
      float* to = sum + r * PANEL;
      switch (rows - r < together ? rows - r : together) {
        case 1: rows_i8<1>(x, stride, at, n, widen, to, b > 0, next); break;
        case 2: rows_i8<2>(x, stride, at, n, widen, to, b > 0, next); break;
        case 3: rows_i8<3>(x, stride, at, n, widen, to, b > 0, next); break;
        case 4: rows_i8<4>(x, stride, at, n, widen, to, b > 0, next); break;
        case 5: rows_i8<5>(x, stride, at, n, widen, to, b > 0, next); break;
        case 6: rows_i8<6>(x, stride, at, n, widen, to, b > 0, next); break;
      }
    }
  }
  return true;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
