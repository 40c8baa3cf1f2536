// Compact weights (compact.h) with vectors of 32 bytes: 16 columns of two lines at a time. Few rows are multiplied by what is
// expanded in registers, in the order of gemm_avx2.h, so the bits are the same.
#pragma once
#include "compact.h"
#include "gemm_avx2.h"

namespace {

constexpr int COMPACT_ROWS = 4;  // more are faster with what was expanded once
constexpr int COMPACT_BLOCK = BLOCK_UNITS * UNIT_BYTES;
constexpr int COMPACT_AHEAD = COMPACT_BLOCK;  // bytes that are asked for early; twice as many win less

// The sixteen high bytes of a panel, ready for lookups.
INLINE __m256i high_bytes(const uint8_t* high) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)high));
}

// Half of a unit: columns 8 v .. 8 v + 7 of its lines 2 * half and 2 * half + 1.
INLINE void expand_columns(const uint8_t* unit, int half, int v, __m256i high, __m256i (&line)[2]) {
  __m256i code = _mm256_loadu_si256((const __m256i*)(unit + v * 32));
  __m256i low = _mm256_loadu_si256((const __m256i*)(unit + 64 * (1 + half) + v * 32));
  code = _mm256_and_si256(half ? _mm256_srli_epi16(code, 4) : code, _mm256_set1_epi8(15));
  __m256i top = _mm256_shuffle_epi8(high, code);
  line[0] = _mm256_unpacklo_epi8(low, top);
  line[1] = _mm256_unpackhi_epi8(low, top);
}

void expand_avx2(const uint8_t* units, int count, const uint8_t* high, bf16* out, const char* ahead) {
  const __m256i bytes = high_bytes(high);
  for (int i = 0; i < count; i++, units += UNIT_BYTES, out += UNIT) {
    for (int half = 0; half < 2; half++)
      for (int v = 0; v < 2; v++) {
        __m256i line[2];
        expand_columns(units, half, v, bytes, line);
        for (int l = 0; l < 2; l++) _mm256_storeu_si256((__m256i*)(out + half * 64 + l * 32 + v * 16), line[l]);
      }
    if (!ahead) continue;
    for (int at = 0; at < UNIT_BYTES; at += 64) _mm_prefetch(ahead + i * UNIT_BYTES + at, _MM_HINT_T0);
  }
}

// Puts those weights of two lines right whose high byte is none of the sixteen; `place` is the first line's first one.
NOINLINE void mend_columns(uint32_t place, int v, const Patch* patch, const Patch* end, __m256i (&line)[2]) {
  alignas(32) bf16 weights[2][16];
  for (int l = 0; l < 2; l++) _mm256_store_si256((__m256i*)weights[l], line[l]);
  for (; patch != end; patch++) {
    uint32_t at = patch->place - place;  // below place: larger than any
    if (at < 64 && int(at) % 32 / 16 == v) weights[at / 32][at % 16] = patch->value;
  }
  for (int l = 0; l < 2; l++) line[l] = _mm256_load_si256((const __m256i*)weights[l]);
}

// Some blocks of a panel; `place` is that of their first weight, `patch` the first patch of theirs.
struct Stretch {
  const uint8_t* units;
  int blocks;
  uint32_t place;
  const Patch *patch, *end;
};

// T neighbouring tiles of one block; with MEND, bit i of `mend` says that their unit i has patches.
template <int R, int T, bool MEND>
INLINE void compact_tiles(const float* x, const uint8_t* units, __m256i high, const Patch* patch, const Patch* end,
                          uint32_t mend, uint32_t place, const char* line_ahead, __m256 (&total)[R][2 * T]) {
  for (int u = 0; u < 4; u++, x += 8) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
#pragma GCC unroll 2
      for (int t = 0; t < T; t++) {
        int unit = t * 4 + u;
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          __m256i line[2];
          expand_columns(units + unit * UNIT_BYTES, half, v, high, line);
          if (MEND && mend >> unit & 1) {
            __m256i mended[] = {line[0], line[1]};  // so that `line` itself stays in registers
            mend_columns(place + unit * UNIT + half * 64, v, patch, end, mended);
            line[0] = mended[0], line[1] = mended[1];
          }
#pragma GCC unroll 2
          for (int l = 0; l < 2; l++) {
            __m256 first = first_of(line[l]), second = second_of(line[l]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
              const float* at = x + r * WIDE_ROW + half * 4 + l * 2;
              __m256& sum = total[r][t * 2 + v];
              sum = _mm256_fmadd_ps(_mm256_broadcast_ss(at), first, sum);
              sum = _mm256_fmadd_ps(_mm256_broadcast_ss(at + 1), second, sum);
            }
          }
        }
      }
    }
#pragma GCC unroll 6
    for (int i = 0; i < 3 * T; i++, line_ahead += 64) _mm_prefetch(line_ahead, _MM_HINT_T0);
  }
}

template <int R>
NOINLINE void compact_by_rows(const float* x, Stretch s, __m256i high, float* sum, bool add, const LinesAhead& ahead) {
  constexpr int T = R == 1 ? 2 : 1, V = 2 * T;
  for (int b = 0; b < s.blocks; b++, x += BLOCK, s.units += COMPACT_BLOCK, s.place += PANEL_BLOCK, add = true) {
    uint32_t mend = 0;
    const Patch* end = s.patch;
    for (; end != s.end && end->place < s.place + PANEL_BLOCK; end++) mend |= 1u << ((end->place - s.place) / UNIT);
    for (int t = 0; t < 4; t += T) {
      const uint8_t* units = s.units + t * 4 * UNIT_BYTES;
      __m256 total[R][V];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
          total[r][v] = add ? _mm256_loadu_ps(sum + r * PANEL + t * 16 + v * 8) : _mm256_setzero_ps();
      uint32_t some = mend >> (t * 4) & ((1 << 4 * T) - 1);
      if (some)
        compact_tiles<R, T, true>(x, units, high, s.patch, end, some, s.place + t * TILE, ahead.of(units), total);
      else
        compact_tiles<R, T, false>(x, units, high, nullptr, nullptr, 0, 0, ahead.of(units), total);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm256_storeu_ps(sum + r * PANEL + t * 16 + v * 8, total[r][v]);
    }
    s.patch = end;
  }
}

constexpr decltype(&compact_by_rows<1>) compact_by_some[] = {nullptr, compact_by_rows<1>, compact_by_rows<2>, compact_by_rows<3>,
                                                             compact_by_rows<4>};

bool compact_avx2(const bf16* a, size_t stride, int rows, const uint8_t* units, const uint8_t* high, int blocks,
                  const Patch* patch, const Patch* end, float* sum, const char* after) {
  if (rows > COMPACT_ROWS) return false;
  if (rows < 1) return true;
  alignas(64) float x[COMPACT_ROWS * WIDE_ROW];
  const __m256i bytes = high_bytes(high);
  LinesAhead ahead{reinterpret_cast<const char*>(units) + size_t(blocks) * COMPACT_BLOCK, after, COMPACT_AHEAD};
  Stretch s{units, 0, 0, patch, end};
  for (int b = 0; b < blocks; b += ROW_BLOCKS) {
    s.blocks = std::min(ROW_BLOCKS, blocks - b);
    widen_rows(a + b * BLOCK, stride, rows, s.blocks, x);
    compact_by_some[rows](x, s, bytes, sum, b > 0, ahead);
    s.units += s.blocks * COMPACT_BLOCK;
    s.place += s.blocks * PANEL_BLOCK;
    while (s.patch != end && s.patch->place < s.place) s.patch++;
  }
  return true;
}

// Of 64 weights: the low bytes to `low`, the codes as bytes; bit i of the result says that weight i has none.
INLINE uint64_t split(const bf16* w, const uint8_t* high, uint8_t* low, __m256i (&code)[2]) {
  uint64_t missing = 0;
  for (int v = 0; v < 2; v++) {
    __m256i first = _mm256_loadu_si256((const __m256i*)(w + v * 16));
    __m256i second = _mm256_loadu_si256((const __m256i*)(w + 32 + v * 16)), byte = _mm256_set1_epi16(255);
    __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte));
    _mm256_storeu_si256((__m256i*)(low + v * 32), bytes);
    __m256i top = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
    __m256i found = _mm256_setzero_si256();
    code[v] = found;
    for (int k = 0; k < 16; k++) {
      __m256i here = _mm256_cmpeq_epi8(top, _mm256_set1_epi8(char(high[k])));
      code[v] = _mm256_blendv_epi8(code[v], _mm256_set1_epi8(char(k)), here);
      found = _mm256_or_si256(found, here);
    }
    for (uint32_t bits = ~uint32_t(_mm256_movemask_epi8(found)); bits; bits &= bits - 1) {
      int at = __builtin_ctz(bits), lane = v * 2 + at / 16, within = at % 16;  // back to the order of weights
      missing |= 1ull << (within / 8 * 32 + lane * 8 + within % 8);
    }
  }
  return missing;
}

void pack_avx2(const bf16* panel, int count, const uint8_t* high, uint8_t* units, uint64_t* missing) {
  for (int i = 0; i < count; i++, panel += UNIT, units += UNIT_BYTES, missing += 2) {
    __m256i even[2], odd[2];
    missing[0] = split(panel, high, units + 64, even);
    missing[1] = split(panel + 64, high, units + 128, odd);
    for (int v = 0; v < 2; v++)
      _mm256_storeu_si256((__m256i*)(units + v * 32), _mm256_or_si256(even[v], _mm256_slli_epi16(odd[v], 4)));
  }
}

}  // namespace
