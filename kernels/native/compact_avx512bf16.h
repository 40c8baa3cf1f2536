// Products of few rows with compact weights (compact.h), which are expanded in registers and never written anywhere.
// Sums are added up in the order of gemm_avx512bf16.h, so their bits are the same.
#pragma once
#include <algorithm>

#include "compact_loops.h"

namespace {

constexpr int AHEAD_BLOCKS = 2;  // what is asked for early; 1 is too late, 4 too much
constexpr int CHUNK_BLOCKS = 4;  // what several passes over the same weights take at a time: 12 KiB, in the nearest cache
constexpr int PASS_ROWS = 6;     // their sums are 24 of the 32 registers
constexpr int MOST_ROWS = 24;
constexpr int BLOCK_BYTES = BLOCK_UNITS * UNIT_BYTES;

// Some blocks of a panel; `place` is that of their first weight, `patch` the first patch of theirs.
struct Stretch {
  const uint8_t* units;
  int blocks;
  uint32_t place;
  const Patch *patch, *end;
  const uint8_t* after;  // what is most likely read next
};

// Puts those of 64 expanded weights right whose high byte is none of the sixteen.
__attribute__((noinline)) void mend_half(uint32_t place, const Patch* patch, const Patch* end, __m512i (&line)[2]) {
  alignas(64) bf16 weights[UNIT / 2];
  for (int i = 0; i < 2; i++) _mm512_store_si512(weights + i * 32, line[i]);
  for (; patch != end; patch++)
    if (patch->place >= place && patch->place < place + UNIT / 2) weights[patch->place - place] = patch->value;
  for (int i = 0; i < 2; i++) line[i] = _mm512_load_si512(weights + i * 32);
}

// Two tiles side by side, so that an input is loaded once for both; what comes next is asked for in the order of its
// addresses meanwhile.
template <int R>
void compact_rows_dp(const bf16* a, size_t stride, Stretch s, const HighBytes& high, float* sum, bool add) {
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) total[r][t] = add ? _mm512_loadu_ps(sum + r * PANEL + t * 16) : _mm512_setzero_ps();
  for (int b = 0; b < s.blocks; b++, a += BLOCK, s.units += BLOCK_BYTES, s.place += PANEL_BLOCK) {
    uint32_t mend = 0;  // bit i: unit i has patches
    const Patch* mine = s.patch;
    for (; s.patch != s.end && s.patch->place < s.place + PANEL_BLOCK; s.patch++)
      mend |= 1u << ((s.patch->place - s.place) / UNIT);
    int later = b + AHEAD_BLOCKS;
    const uint8_t* ahead =
        later < s.blocks ? s.units + AHEAD_BLOCKS * BLOCK_BYTES : s.after + (later - s.blocks) * BLOCK_BYTES;
#pragma GCC unroll 2
    for (int t = 0; t < 4; t += 2) {
      for (int u = 0; u < 4; u++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          __m512i line[2][2];
          for (int i = 0; i < 2; i++) {
            int unit = (t + i) * 4 + u;
            expand_half(s.units + unit * UNIT_BYTES, half, high, line[i]);
            if (__builtin_expect(mend >> unit & 1, 0))
              mend_half(s.place + unit * UNIT + half * UNIT / 2, mine, s.patch, line[i]);
          }
          for (int i = 0; i < 3; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 2
          for (int j = 0; j < 2; j++)
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
              int pair;
              memcpy(&pair, a + r * stride + (u * 4 + half * 2 + j) * 2, 4);
              __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
              for (int i = 0; i < 2; i++)
                total[r][t + i] = _mm512_dpbf16_ps(total[r][t + i], x, (__m512bh)line[i][j]);
            }
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < 4; t++) _mm512_storeu_ps(sum + r * PANEL + t * 16, total[r][t]);
}

void compact_pass(int rows, const bf16* a, size_t stride, const Stretch& s, const HighBytes& high, float* sum, bool add) {
  switch (rows) {
    case 1: return compact_rows_dp<1>(a, stride, s, high, sum, add);
    case 2: return compact_rows_dp<2>(a, stride, s, high, sum, add);
    case 3: return compact_rows_dp<3>(a, stride, s, high, sum, add);
    case 4: return compact_rows_dp<4>(a, stride, s, high, sum, add);
    case 5: return compact_rows_dp<5>(a, stride, s, high, sum, add);
    case 6: return compact_rows_dp<6>(a, stride, s, high, sum, add);
  }
}

bool compact_dp(const bf16* a, size_t stride, int rows, const uint8_t* units, const uint8_t* high, int blocks,
                const Patch* patch, const Patch* end, float* sum, const char* after) {
  if (rows > MOST_ROWS) return false;
  const HighBytes bytes(high);
  int passes = (rows + PASS_ROWS - 1) / PASS_ROWS, together = (rows + passes - 1) / passes;
  int chunk = passes == 1 ? blocks : CHUNK_BLOCKS;
  Stretch s{units, 0, 0, patch, end, nullptr};
  for (int b = 0; b < blocks; b += chunk) {
    s.blocks = std::min(chunk, blocks - b);
    const uint8_t* next = s.units + s.blocks * BLOCK_BYTES;
    s.after = b + chunk < blocks ? next : reinterpret_cast<const uint8_t*>(after);
    for (int r = 0; r < rows; r += together)
      compact_pass(std::min(together, rows - r), a + r * stride + b * BLOCK, stride, s, bytes, sum + r * PANEL, b > 0);
    s.units = next;
    s.place += s.blocks * PANEL_BLOCK;
    while (s.patch != end && s.patch->place < s.place) s.patch++;
  }
  return true;
}

}  // namespace
