// Products with int8 weights for processors with AVX-512 VNNI: VPDPBUSD multiplies a row's bytes by weights as they lie.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#include <immintrin.h>

#include <algorithm>

#include "isa.h"
#include "vec.h"
#include "int8_rows.h"

namespace {

constexpr int PASS_ROWS = 4;      // their sums are 8 of the 32 registers
constexpr int SLICE_ROWS = 24;    // whose sums stay in the nearest cache
constexpr int CHUNK_BLOCKS = 4;   // what several passes over the same weights take at a time: 16 KiB
constexpr int AHEAD = 6144;       // bytes that are asked for early

// What is read next: past `end`, what lies at `after`.
struct Ahead {
  const char *end, *after;
  INLINE const char* of(const int8_t* at) const {
    const char* early = reinterpret_cast<const char*>(at) + AHEAD;
    return early < end ? early : after + (early - end);
  }
};

// One tile at a time, so that lines are read in the order of their addresses, which is what prefetchers follow.
template <int R>
INLINE void add_line(const uint8_t* a, size_t stride, const int8_t* line, const char* early, __m512i (&total)[2 * R]) {
  __m512i w = _mm512_loadu_si512(line);
  _mm_prefetch(early, _MM_HINT_T1);
#pragma GCC unroll 8
  for (int r = 0; r < 2 * R; r++) {
    int four;
    memcpy(&four, a + r * stride, 4);
    total[r] = _mm512_dpbusd_epi32(total[r], _mm512_set1_epi32(four), w);
  }
}

// Only one tile's sums of one block are in registers: GCC copies more than those at every line.
template <int R>
NOINLINE void rows_vnni(const uint8_t* a, size_t stride, const int8_t* at, int blocks, int32_t* sum, bool add,
                        const Ahead& ahead) {
  for (int b = 0; b < blocks; b++, a += INT8_INPUTS, at += INT8_BLOCK, add = true) {
    const char* early = ahead.of(at);
    const int8_t* line = at;
    for (int t = 0; t < 4; t++) {
      __m512i total[2 * R];
#pragma GCC unroll 8
      for (int r = 0; r < 2 * R; r++)
        total[r] = add ? _mm512_loadu_si512(sum + r * PANEL + t * 16) : _mm512_setzero_si512();
      for (int i = 0; i < INT8_INPUTS; i += 4, line += 64, early += 64) add_line<R>(a + i, stride, line, early, total);
#pragma GCC unroll 8
      for (int r = 0; r < 2 * R; r++) _mm512_storeu_si512(sum + r * PANEL + t * 16, total[r]);
    }
  }
}

constexpr decltype(&rows_vnni<1>) some_rows[] = {nullptr, rows_vnni<1>, rows_vnni<2>, rows_vnni<3>, rows_vnni<4>};

}  // namespace

void to_bytes_avx512(const bf16* x, int size, const ByteRows& to, int row) { row_to_bytes(x, size, to, row); }

void gemm_bytes_vnni(const ByteRows& a, int rows, const Int8Panel& panel, float* sum, Next next) {
  alignas(64) int32_t whole[2 * SLICE_ROWS * PANEL];
  Ahead ahead{reinterpret_cast<const char*>(panel.data) + size_t(panel.blocks) * INT8_BLOCK, next.data};
  for (int c = 0; c < PANEL; c += 16) {  // which the sums need in the end, and which lie elsewhere
    _mm_prefetch(reinterpret_cast<const char*>(panel.scale + c), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(panel.correction + c), _MM_HINT_T0);
  }
  for (int first = 0; first < rows; first += SLICE_ROWS) {
    int n = std::min(SLICE_ROWS, rows - first), passes = (n + PASS_ROWS - 1) / PASS_ROWS;
    int chunk = passes == 1 ? panel.blocks : CHUNK_BLOCKS;
    for (int b = 0; b < panel.blocks; b += chunk)
      for (int p = 0, r = 0; p < passes; p++) {
        int some = (n - r) / (passes - p);
        some_rows[some](a.from(first + r).data + b * INT8_INPUTS, a.stride, panel.data + size_t(b) * INT8_BLOCK,
                        std::min(chunk, panel.blocks - b), whole + 2 * r * PANEL, b > 0, ahead);
        r += some;
      }
    bytes_to_sums(whole, n, panel, a.scale + first, sum + first * PANEL);
  }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
