// Packs FP8 weights into panels (fp8.h), and multiplies by them.
#include "fp8.h"

#include <math.h>

#include <algorithm>
#include <stdexcept>

#include "weights.h"

namespace {

constexpr float NO_SUM[16] = {};
constexpr int SLICE = 32;  // rows whose products with a group wait for its scales

// sum (+)= product, each tile times its scale.
void add_group(const Isa& isa, float* sum, const float* product, int rows, const float* scale, bool add) {
  for (int i = 0; i < rows * 4; i++, sum += 16, product += 16)
    isa.add_scaled(sum, add ? sum : NO_SUM, product, scale[i % 4], 16);
}

}  // namespace

void gemm_fp8(const Isa& isa, const bf16* a, size_t stride, int rows, const char* panel, int blocks, float* sum) {
  alignas(64) bf16 wide[FP8_BLOCKS * PANEL_BLOCK];
  alignas(64) float product[SLICE * PANEL];
  for (int b = 0; b < blocks; b += FP8_BLOCKS, a += FP8_GROUP) {
    int n = std::min(FP8_BLOCKS, blocks - b);
    const float* scale = reinterpret_cast<const float*>(panel);
    const char* codes = panel + FP8_SCALES;
    panel = codes + n * PANEL_BLOCK;
    if (isa.fp8_few_rows && isa.fp8_few_rows(a, stride, rows, codes, n, product)) {
      add_group(isa, sum, product, rows, scale, b > 0);
      continue;
    }
    isa.widen_fp8(codes, n * PANEL_BLOCK / FP8_LINE, wide);
    for (int r = 0; r < rows; r += SLICE) {
      int some = std::min(SLICE, rows - r);
      isa.b.gemm(a + r * stride, stride, some, wide, n, product, false, {});
      add_group(isa, sum + r * PANEL, product, some, scale, b > 0);
    }
  }
}

void Panels::pack_fp8(int index, const Fp8Source& source, const std::function<int(int)>& row_of) {
  if (dtype_ != Dtype::fp8) throw std::invalid_argument("these weights are not kept as FP8");
  int across = ceil_div(inputs_, FP8_GROUP), first_blocks = ceil_div(source.second, FP8_GROUP);
  for (int column = 0; column < panels_ * PANEL; column++) {
    int row = row_of(column), within = column % PANEL;
    if (row < 0) continue;
    int down = row < source.second ? row / FP8_GROUP : first_blocks + (row - source.second) / FP8_GROUP;
    const uint8_t* code = source.code + size_t(row) * inputs_;
    char* to = this->to(index, column / PANEL);
    for (int k = 0; k < inputs_; k += FP8_GROUP) {
      float& scale = reinterpret_cast<float*>(to)[within / 16];
      if (within % 16 == 0) scale = source.scale[size_t(down) * across + k / FP8_GROUP];
      to += FP8_SCALES;
      int some = std::min(FP8_GROUP, inputs_ - k);
      for (int i = 0; i < some; i++) {
        if ((code[k + i] & 0x7f) == 0x7f) scale = NAN;  // e4m3's only one that is no number
        int e = within / 16 * TILE + i % BLOCK / 2 * 32 + within % 16 * 2 + i % 2;
        to[i / BLOCK * PANEL_BLOCK + fp8_place(e)] = char(code[k + i]);
      }
      to += ceil_div(some, BLOCK) * PANEL_BLOCK;
    }
  }
}
