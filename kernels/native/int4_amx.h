// Products with int4 weights with AMX: a few blocks are widened to bf16 in the nearest cache, while those before them are
// multiplied. Each group's product leaves its tile for registers, where scales join it.
#pragma once
#include "gemm_amx.h"
#include "int4_loops.h"

namespace {

constexpr int INT4_CHUNK = 4;  // blocks that are widened at a time: 16 KiB
constexpr int INT4_TILES_AHEAD = 4096;  // bytes that are asked for early

// Some whole groups of a panel, widened by and by. GROUP: blocks of a group.
template <int GROUP>
struct Int4Chunk {
  const char* at = nullptr;  // the first group
  int blocks = 0, scale_bytes = 0;
  bool e2m1 = false;
  bf16* wide = nullptr;

  INLINE const char* group(int b) const { return at + b / GROUP * (scale_bytes + GROUP * INT4_BLOCK); }
  INLINE const char* block(int b) const { return group(b) + scale_bytes + b % GROUP * INT4_BLOCK; }
  // Block b, if there is one: memory is read in the order of addresses.
  INLINE void widen(int b, const Int4Ahead& ahead) const {
    if (b >= blocks) return;
    const char* from = block(b);
    for (int tile = 0; tile < 4; tile++, from += INT4_TILE) {
      for (int line = 0; line < INT4_TILE; line += 64) _mm_prefetch(ahead.of(from + line), _MM_HINT_T1);
      widen_int4_tile(from, e2m1, wide + b * PANEL_BLOCK + tile * TILE);
    }
  }
};

// Compilers want the numbers of tiles as they are written.
INLINE void multiply_block(int b, const bf16* weights) {
  _tile_loadd(6, weights, 64);
  if (b == 0) _tile_dpbf16ps(4, 0, 6);
  if (b == 1) _tile_dpbf16ps(4, 1, 6);
  if (b == 2) _tile_dpbf16ps(4, 2, 6);
  if (b == 3) _tile_dpbf16ps(4, 3, 6);
}

// Up to 16 rows, ROWS of which count, times N blocks whose inputs are in tiles 0 .. N - 1.
template <int ROWS, int N, int GROUP>
INLINE void int4_column(const Int4Chunk<GROUP>& chunk, int tile, bool wide, float* sum, bool add) {
  alignas(64) float part[INT4_CHUNK][256];
  __m512 total[ROWS];
  for (int r = 0; r < ROWS; r++) total[r] = add ? _mm512_loadu_ps(sum + r * PANEL + tile * 16) : _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int b = 0; b < N; b++) {
    if (b % GROUP == 0) _tile_zero(4);
    multiply_block(b, chunk.wide + b * PANEL_BLOCK + tile * TILE);
    if ((b + 1) % GROUP && b + 1 < N) continue;
    _tile_stored(4, part[b], 64);
    __m512 scale = scales_at(chunk.group(b), wide, tile);
    for (int r = 0; r < ROWS; r++) total[r] = _mm512_fmadd_ps(_mm512_load_ps(part[b] + r * 16), scale, total[r]);
  }
  for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(sum + r * PANEL + tile * 16, total[r]);
}

template <int ROWS, int N, int GROUP>
NOINLINE void int4_chunk(const bf16* a, size_t stride, const Int4Chunk<GROUP>& chunk, const Int4Chunk<GROUP>& next, bool wide,
                         float* sum, bool add, const Int4Ahead& ahead) {
  _tile_loadd(0, a, stride * 2);
  if (N > 1) _tile_loadd(1, a + BLOCK, stride * 2);
  if (N > 2) _tile_loadd(2, a + 2 * BLOCK, stride * 2);
  if (N > 3) _tile_loadd(3, a + 3 * BLOCK, stride * 2);
  static_assert(INT4_CHUNK == 4, "a block of the next chunk for each tile of this one");
  for (int tile = 0; tile < 4; tile++) {
    int4_column<ROWS, N>(chunk, tile, wide, sum, add);
    next.widen(tile, ahead);
  }
}

template <int ROWS, int GROUP>
constexpr decltype(&int4_chunk<ROWS, 1, GROUP>) int4_some[] = {
    nullptr, int4_chunk<ROWS, 1, GROUP>, int4_chunk<ROWS, 2, GROUP>, int4_chunk<ROWS, 3, GROUP>, int4_chunk<ROWS, 4, GROUP>};

template <int GROUP>
void int4_groups(const bf16* a, size_t stride, int rows, const Int4Panel& panel, float* sum, const char* after) {
  alignas(64) bf16 wide[2][INT4_CHUNK * PANEL_BLOCK];
  Groups groups{GROUP * BLOCK, panel.wide};
  Int4Ahead ahead{panel.data + groups.panel_bytes(panel.blocks), after, INT4_TILES_AHEAD};
  auto chunk_at = [&](int b, const char* at) {
    int n = panel.blocks - b < INT4_CHUNK ? panel.blocks - b : INT4_CHUNK;
    return Int4Chunk<GROUP>{at, n, int(groups.scale_bytes()), panel.e2m1, wide[b / INT4_CHUNK % 2]};
  };
  Int4Chunk<GROUP> chunk = chunk_at(0, panel.data), none;
  for (int b = 0; b < INT4_CHUNK; b++) chunk.widen(b, ahead);
  for (int b = 0; b < panel.blocks; b += INT4_CHUNK) {
    auto next = b + INT4_CHUNK < panel.blocks ? chunk_at(b + INT4_CHUNK, chunk.block(chunk.blocks - 1) + INT4_BLOCK) : none;
    for (int r = 0; r < rows; r += 16) {
      int n = rows - r, blocks = chunk.blocks;
      auto* some = n > 8 ? int4_some<16, GROUP>[blocks] : n > 4 ? int4_some<8, GROUP>[blocks] : int4_some<4, GROUP>[blocks];
      some(a + r * stride + b * BLOCK, stride, chunk, r ? none : next, panel.wide, sum + r * PANEL, b > 0, ahead);
    }
    chunk = next;
  }
}

// Groups of other sizes are multiplied as gemm_i4 does it.
bool int4_amx(const bf16* a, size_t stride, int rows, const Int4Panel& panel, float* sum, const char* after) {
  if (panel.group == 1) return int4_groups<1>(a, stride, rows, panel, sum, after), true;
  if (panel.group == 2) return int4_groups<2>(a, stride, rows, panel, sum, after), true;
  if (panel.group == 4) return int4_groups<4>(a, stride, rows, panel, sum, after), true;
  return false;
}

}  // namespace
