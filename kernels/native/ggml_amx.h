// Products with ggml's types (ggml.h) with AMX, for many rows: TDPBSUD multiplies a row's high or low bytes by codes. Sums are the
// whole numbers that VPDPBUSD gives, and become floats in the same way, so a row has the same bits with both.
//
// A tile has 64 inputs, which are two blocks. Codes of a block (of Q6_K: of half a block) become a tile with zeros in the place
// of all others, so that their sums stay apart.
#pragma once
#include "gemm_amx.h"
#include "ggml_avx512.h"
#include "int4_loops.h"

void gemm_ggml_vnni(const ByteRows&, int, const GgmlPanel&, float*, Next);  // ggml_vnni.cpp

namespace {

constexpr int GGML_TILE_ROWS = 16;
constexpr int GGML_FEW_ROWS = 8;  // which leave half of a tile empty, and are multiplied by VPDPBUSD
constexpr int GGML_BYTES_AHEAD = 8192;  // that are asked for early

template <GgmlType TYPE>
constexpr int ggml_parts() {
  return TYPE == GgmlType::q6_k ? 2 : 1;
}

// Two blocks, whose codes are bytes now, by tile and part.
template <GgmlType TYPE>
struct TwoBlocks {
  alignas(64) uint8_t codes[2][4][ggml_parts<TYPE>()][1024] = {};
  const char* scales[2] = {};

  template <int LINE>
  INLINE void put_line(const char* tile, int odd, int t) {
    __m512i first, second;
    two_vectors<ggml_shape(TYPE).bits, LINE>(tile, first, second);
    uint8_t* to = codes[odd][t][LINE / 2 % ggml_parts<TYPE>()] + (odd * 8 + LINE * 2) * 64;
    _mm512_store_si512(to, first);
    _mm512_store_si512(to + 64, second);
  }
  INLINE void put(const char* at, int odd, const Int4Ahead& ahead) {
    constexpr int bytes = ggml_shape(TYPE).tile_bytes();
    for (int t = 0; t < 4; t++, at += bytes) {
      const char* early = ahead.of(at);
      for (int i = 0; i < bytes; i += 64) _mm_prefetch(early + i, _MM_HINT_T1);
      put_line<0>(at, odd, t), put_line<1>(at, odd, t), put_line<2>(at, odd, t), put_line<3>(at, odd, t);
    }
  }
};

// Up to 16 rows times blocks block .. block + count - 1, the first of which is even.
template <GgmlType TYPE>
INLINE void sixteen_rows(const WordRows& rows, int n, int block, int count, const TwoBlocks<TYPE>& blocks, float* sum) {
  alignas(64) int32_t high[GGML_TILE_ROWS * 16], low[GGML_TILE_ROWS * 16];
  _tile_loadd(4, rows.at(block), 2 * rows.stride);
  _tile_loadd(5, rows.at(block) + rows.stride, 2 * rows.stride);
  for (int odd = 0; odd < count; odd++)
    for (int t = 0; t < 4; t++)
      for (int part = 0; part < ggml_parts<TYPE>(); part++) {
        _tile_loadd(6, blocks.codes[odd][t][part], 64);
        _tile_zero(0);
        _tile_zero(1);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 5, 6);
        TileScales scale = scales_of<TYPE>(blocks.scales[odd], (block + odd) % ggml_shape(TYPE).blocks(), part, t);
        _tile_stored(0, high, 64);
        _tile_stored(1, low, 64);
        for (int r = 0; r < n; r++)
          add_part<TYPE>(_mm512_load_si512(high + r * 16), _mm512_load_si512(low + r * 16), rows.sum<TYPE>(r, block + odd, part),
                         scale, sum + r * PANEL + t * 16, block + odd + part > 0);
      }
}

template <GgmlType TYPE>
NOINLINE void ggml_tiles(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, const char* after) {
  constexpr GgmlShape shape = ggml_shape(TYPE);
  const int inputs = panel.blocks * BLOCK;
  Int4Ahead ahead{panel.data + shape.panel_bytes(inputs), after, GGML_BYTES_AHEAD};
  TwoBlocks<TYPE> blocks;
  const char *at = panel.data, *scales = at;
  for (int b = 0; b < panel.blocks; b += 2) {
    int count = panel.blocks - b < 2 ? 1 : 2;
    for (int odd = 0; odd < count; odd++, at += shape.block_bytes()) {
      if ((b + odd) % shape.blocks() == 0) scales = at, at += shape.scale_bytes();
      blocks.scales[odd] = scales;
      blocks.put(at, odd, ahead);
    }
    for (int r = 0; r < rows; r += GGML_TILE_ROWS) {
      int n = rows - r < GGML_TILE_ROWS ? rows - r : GGML_TILE_ROWS;
      sixteen_rows<TYPE>({a.from(r).data, a.stride, numbers_of(inputs)}, n, b, count, blocks, sum + r * PANEL);
    }
  }
  scale_rows(sum, rows, a.scale);
}

constexpr decltype(&ggml_tiles<GgmlType::q4_0>) ggml_tiles_of[GGML_TYPES] = {
    ggml_tiles<GgmlType::q4_0>, ggml_tiles<GgmlType::q5_0>, ggml_tiles<GgmlType::q8_0>,
    ggml_tiles<GgmlType::q4_k>, ggml_tiles<GgmlType::q5_k>, ggml_tiles<GgmlType::q6_k>};

void gemm_ggml_tiles(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next next) {
  int rest = rows % GGML_TILE_ROWS <= GGML_FEW_ROWS ? rows % GGML_TILE_ROWS : 0, most = rows - rest;
  if (most) ggml_tiles_of[int(panel.type)](a, most, panel, sum, rest ? panel.data : next.data);
  if (rest) gemm_ggml_vnni(a.from(most), rest, panel, sum + most * PANEL, next);
}

}  // namespace
