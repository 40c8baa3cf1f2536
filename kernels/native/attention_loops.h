// Inner loops of paged attention over chunks of 64 keys: packing of keys and values, and the running softmax.
#pragma once
#include "isa.h"
#include "vec.h"

namespace {

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (u32v){__VA_ARGS__})
#endif

// Exchange the off-diagonal blocks of `distance` lanes between rows i and i + distance.
#define EXCHANGE(distance, LOW, HIGH)                        \
  for (int i = 0; i < 16; i++) {                             \
    if (i & distance) continue;                              \
    u32v a = row[i], b = row[i + distance];                  \
    row[i] = SHUFFLE(a, b, LOW);                             \
    row[i + distance] = SHUFFLE(a, b, HIGH);                 \
  }
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31

INLINE void transpose(u32v* row) {
  EXCHANGE(8, LOW8, HIGH8)
  EXCHANGE(4, LOW4, HIGH4)
  EXCHANGE(2, LOW2, HIGH2)
  EXCHANGE(1, LOW1, HIGH1)
}

// 16 rows by 64 bytes -> 16 lines of 64 bytes, the 32-bit words transposed.
template <class E>
INLINE void transpose_words(const E* const* rows, int first, int size, E* out) {
  constexpr int words = 64 / sizeof(E);
  int n = size - first < words ? size - first : words;
  u32v lines[16];
  for (int i = 0; i < 16; i++) {
    lines[i] = u32v{};
    if (!rows[i] || n <= 0) continue;
    if (n == words)
      lines[i] = load_raw<u32v>(rows[i] + first);
    else
      memcpy(&lines[i], rows[i] + first, n * sizeof(E));
  }
  transpose(lines);
  for (int i = 0; i < 16; i++) store_raw(out + i * words, lines[i]);
}

template <class E>
void pack_keys(const E* const* rows, int size, int blocks, E* panel) {
  constexpr int words = 64 / sizeof(E);
  for (int b = 0; b < blocks; b++)
    for (int t = 0; t < 4; t++)
      for (int k = 0; k < BLOCK; k += words)
        transpose_words(rows + t * 16, b * BLOCK + k, size, panel + b * PANEL_BLOCK + t * TILE + k * 16);
}

template <class E>
INLINE void copy_lanes(const E* row, int first, int columns, E* lanes) {
  int n = columns - first;
  if (!row || n <= 0)
    memset(lanes, 0, LANES * sizeof(E));
  else if (n >= LANES)
    memcpy(lanes, row + first, LANES * sizeof(E));
  else
    memset(lanes, 0, LANES * sizeof(E)), memcpy(lanes, row + first, n * sizeof(E));
}

void pack_values(const float* const* rows, int first, int columns, float* panel) {
  for (int k = 0; k < 64; k++)
    for (int t = 0; t < 4; t++)
      copy_lanes(rows[k], first + t * 16, columns, panel + k / BLOCK * PANEL_BLOCK + t * TILE + k % BLOCK * 16);
}

void pack_values(const bf16* const* rows, int first, int columns, bf16* panel) {
  for (int p = 0; p < 32; p++) {
    bf16* line = panel + p / 16 * PANEL_BLOCK + p % 16 * 32;
    for (int t = 0; t < 4; t++) {
      bf16 even[LANES], odd[LANES];
      copy_lanes(rows[2 * p], first + t * 16, columns, even);
      copy_lanes(rows[2 * p + 1], first + t * 16, columns, odd);
      u32v low = __builtin_convertvector(load_raw<u16v>(even), u32v);
      u32v high = __builtin_convertvector(load_raw<u16v>(odd), u32v);
      store_raw(line + t * TILE, low | (high << 16));
    }
  }
}

template <class E>
float softmax(const float* score, float scale, int low, int high, float* top, float* total, E* weight) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32v s[4], best = splat(*top);
  i32v seen[4];
  for (int t = 0; t < 4; t++) {
    s[t] = load(score + t * 16) * scale;
    seen[t] = (lane + t * 16 >= low) & (lane + t * 16 < high);
    best = seen[t] ? maximum(best, s[t]) : best;
  }
  float peak = max_lanes(best);
  f32v sum = {};
  for (int t = 0; t < 4; t++) {
    f32v w = seen[t] ? exp_lanes(s[t] - peak) : f32v{};
    store(weight + t * 16, w);
    sum += w;
  }
  float lanes[LANES] = {*top - peak};
  store(lanes, exp_lanes(load(lanes)));
  float kept = *top == peak ? 1.0f : lanes[0];
  *total = *total * kept + sum_lanes(sum);
  *top = peak;
  return kept;
}

}  // namespace
