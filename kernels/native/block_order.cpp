#include "block_order.h"

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kRows = 4 << 10;
constexpr int kPair = 2;  // bytes of an element where a word has two

// `out[x][y] = in[y][x]` for words of 4 bytes; rows are `from_step` and `to_step` bytes apart.
using Transpose = void (*)(const char* from, size_t from_step, char* to, size_t to_step, int high, int wide);

void transpose(const char* from, size_t from_step, char* to, size_t to_step, int high, int wide) {
  for (int x = 0; x < wide; x++)
    for (int y = 0; y < high; y++) memcpy(to + x * to_step + y * 4, from + y * from_step + x * 4, 4);
}

// Sixteen columns of a pair of tokens, whose elements of two bytes lie in turns in the tile.
using PartPair = void (*)(const char* tile, char* first, char* second);
using JoinPair = void (*)(const char* first, const char* second, char* tile);

void part_pair(const char* tile, char* first, char* second) {
  for (int c = 0; c < 16; c++) {
    memcpy(first + 2 * c, tile + 4 * c, 2);
    memcpy(second + 2 * c, tile + 4 * c + 2, 2);
  }
}

void join_pair(const char* first, const char* second, char* tile) {
  for (int c = 0; c < 16; c++) {
    memcpy(tile + 4 * c, first + 2 * c, 2);
    memcpy(tile + 4 * c + 2, second + 2 * c, 2);
  }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))

AVX2 inline __m256i load(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
AVX2 inline void store(char* at, __m256i value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value); }

AVX2 inline void transpose8(const char* from, size_t from_step, char* to, size_t to_step) {
  __m256i row[8], pair[8], four[8];
  for (int i = 0; i < 8; i++) row[i] = load(from + i * from_step);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      four[i + 2 * j] = _mm256_unpacklo_epi64(pair[i + j], pair[i + j + 2]);
      four[i + 2 * j + 1] = _mm256_unpackhi_epi64(pair[i + j], pair[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    store(to + i * to_step, _mm256_permute2x128_si256(four[i], four[i + 4], 0x20));
    store(to + (i + 4) * to_step, _mm256_permute2x128_si256(four[i], four[i + 4], 0x31));
  }
}

AVX2 void transpose_avx2(const char* from, size_t from_step, char* to, size_t to_step, int high, int wide) {
  for (int y = 0; y < high; y += 8)
    for (int x = 0; x < wide; x += 8)
      transpose8(from + y * from_step + x * 4, from_step, to + x * to_step + y * 4, to_step);
}

AVX2 void part_pair_avx2(const char* tile, char* first, char* second) {
  const __m256i low = load(tile), high = load(tile + 32), half = _mm256_set1_epi32(0xFFFF);
  __m256i one = _mm256_packus_epi32(_mm256_and_si256(low, half), _mm256_and_si256(high, half));
  __m256i other = _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
  store(first, _mm256_permute4x64_epi64(one, 0xD8));
  store(second, _mm256_permute4x64_epi64(other, 0xD8));
}

AVX2 void join_pair_avx2(const char* first, const char* second, char* tile) {
  const __m256i one = load(first), other = load(second);
  __m256i low = _mm256_unpacklo_epi16(one, other), high = _mm256_unpackhi_epi16(one, other);
  store(tile, _mm256_permute2x128_si256(low, high, 0x20));
  store(tile + 32, _mm256_permute2x128_si256(low, high, 0x31));
}

const bool kAvx2 = __builtin_cpu_supports("avx2");
const Transpose turn = kAvx2 ? transpose_avx2 : transpose;
const PartPair part_two = kAvx2 ? part_pair_avx2 : part_pair;
const JoinPair join_two = kAvx2 ? join_pair_avx2 : join_pair;
#else
const Transpose turn = transpose;
const PartPair part_two = part_pair;
const JoinPair join_two = join_pair;
#endif

// For each sixteen of columns of each word of tokens, in the order of a tile's addresses: its first token and column.
template <class Visit>
inline void each_sixteen(int size, int lane, Visit visit) {
  const int width = value_width(size);
  for (int wide = 0; wide < size; wide += 16 * width)
    for (int token = 0; token < TILE_TOKENS; token += lane)
      for (int column = wide; column < wide + 16 * width; column += 16) visit(token, column);
}

void values_out(const char* tile, char* rows, int size, int item) {
  const size_t row = size_t(size) * item;
  each_sixteen(size, 4 / item, [&](int token, int column) {
    char* to = rows + token * row + size_t(column) * item;
    if (item == kPair)
      part_two(tile, to, to + row);
    else
      memcpy(to, tile, 64);
    tile += 64;
  });
}

void values_in(const char* rows, char* tile, int size, int item) {
  const size_t row = size_t(size) * item;
  each_sixteen(size, 4 / item, [&](int token, int column) {
    const char* from = rows + token * row + size_t(column) * item;
    if (item == kPair)
      join_two(from, from + row, tile);
    else
      memcpy(tile, from, 64);
    tile += 64;
  });
}

constexpr size_t kKeys = TILE_TOKENS * 4;

size_t row_of(const Part& part) { return size_t(part.size) * part.item; }

}  // namespace

size_t unit_of(const Part& part) {
  return part.layout == Layout::rows ? kRows : TILE_TOKENS * row_of(part);
}

void move_out(const Part& part, const char* memory, char* outside, size_t bytes) {
  switch (part.layout) {
    case Layout::rows:
      memcpy(outside, memory, bytes);
      return;
    case Layout::key_tiles:  // a word of all sixteen tokens, then the next
      turn(memory, kKeys, outside, row_of(part), part.size * part.item / 4, TILE_TOKENS);
      return;
    case Layout::value_tiles:
      values_out(memory, outside, part.size, part.item);
  }
}

void move_in(const Part& part, const char* outside, char* memory, size_t bytes) {
  switch (part.layout) {
    case Layout::rows:
      memcpy(memory, outside, bytes);
      return;
    case Layout::key_tiles:
      turn(outside, row_of(part), memory, kKeys, TILE_TOKENS, part.size * part.item / 4);
      return;
    case Layout::value_tiles:
      values_in(outside, memory, part.size, part.item);
  }
}
