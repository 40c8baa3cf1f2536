// Products with ggml's types (ggml.h) widened to floats: for float rows, and for bf16 rows where no instruction multiplies
// bytes. Weights are the numbers that ggml's own de-quantisers make.
#pragma once
#include "ggml.h"
#include "vec.h"

namespace {

// A block as float tiles (isa.h).
INLINE void widen_ggml_block(GgmlType type, const char* scales, int block, const char* tiles, float* wide) {
  const int bits = ggml_shape(type).bits, low = bits == 8 ? 255 : 15;
  for (int t = 0; t < 4; t++, tiles += ggml_shape(type).tile_bytes(), wide += TILE)
    for (int half = 0; half < 2; half++) {
      alignas(64) float step[16], least[16];
      for (int c = 0; c < 16; c++) {
        GgmlScale scale = ggml_scale(type, scales, block, half, t * 16 + c);
        step[c] = scale.step, least[c] = scale.least;
      }
      for (int k = half * 16; k < half * 16 + 16; k++) {
        alignas(64) float code[16];
        for (int c = 0; c < 16; c++) {
          CodePlace place = ggml_place(bits, k, c);
          int number = uint8_t(tiles[place.low]) >> place.low_shift & low;
          if (bits == 5) number |= (uint8_t(tiles[place.high]) >> place.high_shift & 1) << 4;
          if (bits == 6) number |= (uint8_t(tiles[place.high]) >> place.high_shift & 3) << 4;
#if defined(__aarch64__)
          number ^= ggml_shape(type).offset;
#endif
          code[c] = float(number);
        }
        for (int c = 0; c < 16; c += LANES)
          store(wide + k * 16 + c, load(code + c) * load(step + c) - load(least + c));
      }
    }
}

template <class E>
void gemm_ggml(const E* a, size_t stride, int rows, const GgmlPanel& panel, float* sum, decltype(Loops<float>::gemm) gemm) {
  constexpr int chunk = 4, slice = 32;
  alignas(64) float wide[chunk * PANEL_BLOCK];
  alignas(64) float some_rows[sizeof(E) == sizeof(float) ? 1 : slice * chunk * BLOCK];
  const GgmlShape shape = ggml_shape(panel.type);
  const char *at = panel.data, *scales = at;
  for (int b = 0; b < panel.blocks; b += chunk) {
    int n = panel.blocks - b < chunk ? panel.blocks - b : chunk;
    for (int i = b; i < b + n; i++, at += shape.block_bytes()) {
      if (i % shape.blocks() == 0) scales = at, at += shape.scale_bytes();
      widen_ggml_block(panel.type, scales, i % shape.blocks(), at, wide + (i - b) * PANEL_BLOCK);
    }
    if constexpr (sizeof(E) == sizeof(float)) {
      gemm(a + b * BLOCK, stride, rows, wide, n, sum, b > 0, {});
      continue;
    }
    for (int r = 0; r < rows; r += slice) {
      int some = rows - r < slice ? rows - r : slice;
      for (int i = 0; i < some; i++)
        for (int k = 0; k < n * BLOCK; k += LANES)
          store(some_rows + i * chunk * BLOCK + k, load(a + (r + i) * stride + b * BLOCK + k));
      gemm(some_rows, chunk * BLOCK, some, wide, n, sum + r * PANEL, b > 0, {});
    }
  }
}

}  // namespace
