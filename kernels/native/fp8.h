// Weights in FP8 (e4m3) with a float scale for each 128 x 128 of them, as DeepSeek-V3's checkpoints have it (arXiv 2412.19437,
// 3.3). How a panel of them lies. Nothing is rounded: a code is exact in bf16, and scales are applied to float sums.
//
// A panel is one stream of groups of 128 inputs, the last one may be shorter. A group is the scales of its four tiles, on a
// cache line of their own, and then 2,048 codes for each block of 32 inputs, in the order of a bf16 panel (isa.h) but for
// 64 neighbours: of these, lane l of 16 bytes has numbers 8 l .. 8 l + 7 of their first 32, then of the other 32, because
// unpacking bytes within lanes of 16 is what processors do fast.
#pragma once
#include "isa.h"

constexpr int FP8_GROUP = 128;                       // inputs, and outputs, of a scale
constexpr int FP8_BLOCKS = FP8_GROUP / BLOCK;        // of a group
constexpr int FP8_SCALES = 64;                       // bytes
constexpr int FP8_LINE = 64;                         // codes that are widened at a time

constexpr size_t fp8_panel_bytes(int blocks) {
  return size_t(blocks + FP8_BLOCKS - 1) / FP8_BLOCKS * FP8_SCALES + size_t(blocks) * PANEL_BLOCK;
}

// Where number e of a bf16 panel's block lies.
constexpr int fp8_place(int e) { return e / FP8_LINE * FP8_LINE + e % 32 / 8 * 16 + e % FP8_LINE / 32 * 8 + e % 8; }

// A matrix as the caller has it: its codes, and the scales of its blocks. Rows from `second` on begin new blocks.
struct Fp8Source {
  const uint8_t* code;
  const float* scale;
  int second;
};

// sum[rows][64] = a * panel.
void gemm_fp8(const Isa& isa, const bf16* a, size_t stride, int rows, const char* panel, int blocks, float* sum);
