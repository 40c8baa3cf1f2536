// How a paged cache lies in memory. Rows: a token's elements side by side. Tiles: as a product's panel has its columns
// (isa.h), sixteen tokens of a head at a time, so that attention multiplies them where they lie.
//
// A word is 4 bytes, so `lane` elements: 2 of bf16, 1 of float. Sixteen tokens are 16 * size elements:
//   keys    [size / lane words][16 tokens][lane]           a column is a token, inputs are the head's elements
//   values  [size / 16 w][16 / lane][w][16 columns][lane tokens]  a column is an element, inputs are tokens; w = 4 where
//           the size is a multiple of 64, so that a panel's columns are read in the order of addresses, else 1
#pragma once
#include <stddef.h>
#include <string.h>

#include "element.h"

enum class Layout { rows, key_tiles, value_tiles };

constexpr int TILE_TOKENS = 16;

template <class E>
constexpr int lane_of() {
  return 4 / sizeof(E);
}

// How many sixteens of columns of values lie side by side.
constexpr int value_width(int size) { return size % 64 == 0 ? 4 : 1; }

// From one of their tokens, or pairs of tokens, to the next, in elements.
template <class E>
constexpr int value_step(int size) {
  return value_width(size) * 16 * lane_of<E>();
}

// Where a sixteen of columns begins in its tile.
template <class E>
constexpr int value_column(int size, int column) {
  int width = value_width(size) * 16;
  return column / width * width * TILE_TOKENS + column % width * lane_of<E>();
}

// Where token `token` of a block begins, for rows; where its tile begins, for tiles.
inline size_t token_at(Layout layout, size_t token_stride, int size, int token) {
  return layout == Layout::rows ? token * token_stride : size_t(token) / TILE_TOKENS * TILE_TOKENS * size;
}

// One token's elements to their places; `at` is what token_at says.
template <class E>
void put_token(Layout layout, E* at, int size, int token, const E* row) {
  constexpr int lane = lane_of<E>(), word = TILE_TOKENS * lane;
  int i = token % TILE_TOKENS;
  switch (layout) {
    case Layout::rows:
      memcpy(at, row, size * sizeof(E));
      return;
    case Layout::key_tiles:
      for (int d = 0; d < size; d += lane) memcpy(at + d / lane * word + i * lane, row + d, 4);
      return;
    case Layout::value_tiles:
      at += i / lane * value_step<E>(size) + i % lane;
      for (int c = 0; c < size; c += 16, row += 16) {
        E* column = at + value_column<E>(size, c);
        for (int d = 0; d < 16; d++) column[d * lane] = row[d];
      }
  }
}

// Sixteen values with all but tokens low .. high - 1 as zeros: what another sequence left there may be no number.
template <class E>
void copy_seen(const E* tile, int size, int low, int high, E* out) {
  constexpr int lane = lane_of<E>(), lines = TILE_TOKENS / lane;
  uint32_t mask[lines];
  for (int p = 0; p < lines; p++) {
    mask[p] = 0;
    for (int e = 0; e < lane; e++)
      if (p * lane + e >= low && p * lane + e < high) mask[p] |= (lane == 1 ? ~0u : 0xffffu << e * 16);
  }
  for (int c = 0; c < size; c += 16) {
    size_t at = value_column<E>(size, c);
    for (int p = 0; p < lines; p++, at += value_step<E>(size)) {
      uint32_t word[16];
      memcpy(word, tile + at, 64);
      for (uint32_t& w : word) w &= mask[p];
      memcpy(out + at, word, 64);
    }
  }
}
