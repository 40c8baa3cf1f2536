// Products with int4 weights (int4.h): a group of blocks is widened to what the plain product reads, multiplied, and
// added with its scales. Codes are exact in bf16, so nothing is rounded on the way.
#pragma once
#include "int4.h"
#include "vec.h"

namespace {

#if VECTOR_BYTES == 64 && defined(__x86_64__)
// Numbers by their four bits, twice: a shuffle of words looks at five bits, and the fifth says nothing.
INLINE __m512i int4_numbers(bool e2m1) {
  static const uint16_t numbers[2][16] = {{0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                           0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0},
                                          {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140,
                                           0x0000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140}};
  return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)numbers[e2m1]));
}

INLINE void widen_int4_tile(const char* tile, bool e2m1, bf16* wide) {
  const __m512i numbers = int4_numbers(e2m1);
  for (int line = 0; line < INT4_LINES; line++, tile += 64) {
    __m512i codes = _mm512_loadu_si512(tile);
    for (int i = 0; i < 4; i++, wide += 32, codes = _mm512_srli_epi16(codes, 4))
      _mm512_storeu_si512(wide, _mm512_permutexvar_epi16(codes, numbers));
  }
}

// What is read `bytes` later: past `end`, what lies at `after`.
struct Int4Ahead {
  const char *end, *after;
  int bytes;
  INLINE const char* of(const char* at) const {
    at += bytes;
    return at < end ? at : after + (at - end);
  }
};

INLINE __m512 scales_at(const char* scales, bool wide, int tile) {
  if (wide) return _mm512_loadu_ps(scales + tile * 64);
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(scales + tile * 32)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
#elif defined(__aarch64__)
// Where number (k, column) of a tile lies (isa.h); `value` is exact in bf16.
INLINE void put_number(float value, int k, int column, float* tile) { tile[k * 16 + column] = value; }
INLINE void put_number(float value, int k, int column, bf16* tile) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  tile[k / 2 * 32 + column * 2 + k % 2].bits = uint16_t(bits >> 16);
}

template <class E>
INLINE void widen_int4_tile(const char* tile, bool e2m1, E* wide) {
  for (int k = 0; k < BLOCK; k++)
    for (int c = 0; c < 16; c++) {
      int code = uint8_t(tile[int4_byte(k, c)]) >> (k % 16 / 8 * 4) & 15;
      put_number(float(e2m1 ? E2M1_TWICE[code] : (code ^ 8) - 8), k, c, wide);
    }
}
#else
INLINE void widen_int4_tile(const char* tile, bool e2m1, bf16* wide) {
  for (int line = 0; line < INT4_LINES; line++, tile += 64)
    for (int i = 0; i < 4; i++)
      for (int w = 0; w < 32; w += LANES, wide += LANES) {
        i32v codes = (i32v)(zero_extended(load_raw<u16v>(tile + w * 2)) >> (4 * i)) & 15;
        if (!e2m1) codes -= 8;
        for (int n = 0; e2m1 && n < LANES; n++) codes[n] = E2M1_TWICE[codes[n]];
        u32v bits = (u32v)__builtin_convertvector(codes, f32v);
        store_raw(wide, low_halves(bits >> 16));
      }
}
#endif

#if !defined(__aarch64__)
// A float tile is not in pair order.
INLINE void widen_int4_tile(const char* tile, bool e2m1, float* wide) {
  for (int k = 0; k < BLOCK; k++)
    for (int c = 0; c < 16; c++) {
      uint16_t word;
      memcpy(&word, tile + k / 8 * 64 + (c * 2 + k % 2) * 2, 2);
      int code = word >> (k / 2 % 4 * 4) & 15;
      wide[k * 16 + c] = float(e2m1 ? E2M1_TWICE[code] : code - 8);
    }
}
#endif

INLINE f32v int4_scales(const char* scales, bool wide, int column) {
  return wide ? load((const float*)scales + column) : load((const bf16*)scales + column);
}

// sum[rows][64] (+)= part * scales, one rounding.
INLINE void add_group(const float* part, int rows, const char* scales, bool wide, float* sum, bool add) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < PANEL; c += LANES) {
      f32v so_far = add ? load(sum + r * PANEL + c) : f32v{};
      store(sum + r * PANEL + c, so_far + load(part + r * PANEL + c) * int4_scales(scales, wide, c));
    }
}

template <class E>
void gemm_i4(const E* a, size_t stride, int rows, const Int4Panel& panel, float* sum, decltype(Loops<E>::gemm) gemm) {
  constexpr int chunk = 4, slice = 48;
  alignas(64) E wide[chunk * PANEL_BLOCK];
  alignas(64) float part[slice * PANEL];
  for (int r = 0; r < rows; r += slice) {
    int some = rows - r < slice ? rows - r : slice;
    const char* at = panel.data;
    for (int first = 0; first < panel.blocks; first += panel.group) {
      const char* scales = at;
      at += PANEL * (panel.wide ? 4 : 2);
      int end = panel.blocks - first < panel.group ? panel.blocks : first + panel.group;
      for (int b = first; b < end; b += chunk) {
        int n = end - b < chunk ? end - b : chunk;
        for (int t = 0; t < n * 4; t++, at += INT4_TILE) widen_int4_tile(at, panel.e2m1, wide + t * TILE);
        gemm(a + r * stride + b * BLOCK, stride, some, wide, n, part, b > first, {});
      }
      add_group(part, some, scales, panel.wide, sum + r * PANEL, first > 0);
    }
  }
}

}  // namespace
