// Weights as ggml's types store them (ggml-common.h): codes of 4 to 8 bits, and scales of 16 or 32 inputs. How a panel of
// them lies. It takes the bytes of 64 rows of a GGUF file, and nothing of them is rounded.
//
// A panel is one stream of groups of 32 or 256 inputs. A group is its scales and then its blocks of 32 inputs, a block is four
// tiles of 16 columns. Scales lie by kind and then by column, so 16 columns of one kind are neighbours:
//   Q4_0, Q5_0, Q8_0   the scale, a float16
//   Q4_K, Q5_K         two float16; then the twelve bytes of eight scales and eight minima of 6 bits
//   Q6_K               a float16; then sixteen scales, int8
// A tile has eight vectors of 64 codes, two for eight inputs: of a column the first has inputs 0, 4, 1, 5, the second 2, 6, 3, 7.
// Codes of 8 bits lie so. Of others, two vectors share a line by their lower four bits, and the bits above lie behind these
// lines: vector v has bit v (Q5), or bits 2 (v % 4) and the next of line v / 4 (Q6).
//
// On Arm each four columns of a tile have their codes together: a vector is eight inputs of each, and bits above lie behind the
// lower ones, of Q5 two vectors' in a byte. A code of a type without minima lies as its number, in two's complement.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum class GgmlType : int { q4_0, q5_0, q8_0, q4_k, q5_k, q6_k };
constexpr int GGML_TYPES = 6;

struct GgmlShape {
  int inputs;  // of a group
  int bytes;   // that a row has for a group
  int bits;    // of a code
  int offset;  // what a number is below its code, before scales

  constexpr int blocks() const { return inputs / 32; }
  constexpr int tile_bytes() const { return 64 * bits; }
  constexpr int block_bytes() const { return 4 * tile_bytes(); }
  constexpr int scale_bytes() const { return 64 * bytes - blocks() * block_bytes(); }
  size_t panel_bytes(int inputs_of_panel) const { return size_t(inputs_of_panel / inputs) * bytes * 64; }
};

constexpr GgmlShape GGML_SHAPES[GGML_TYPES] = {{32, 18, 4, 8},    {32, 22, 5, 16},   {32, 34, 8, 128},
                                               {256, 144, 4, 0}, {256, 176, 5, 0}, {256, 210, 6, 32}};
constexpr GgmlShape ggml_shape(GgmlType type) { return GGML_SHAPES[int(type)]; }
constexpr bool has_minima(GgmlType type) { return type == GgmlType::q4_k || type == GgmlType::q5_k; }
constexpr int GGML_STRETCH = 256;  // inputs that products take at a time, whole groups of any type
constexpr int GGML_SUMS = 16;      // inputs of a row whose sum products ask for
constexpr int MOST_GGML_INPUTS = 256;  // of a group

struct GgmlPanel {
  const char* data;
  int blocks;  // of 32 inputs
  GgmlType type;
};

// Where the code of input k of a block's column lies in its tile: byte and shift of its lower bits, and of those above.
struct CodePlace {
  int low, low_shift, high, high_shift;
};
constexpr CodePlace ggml_place(int bits, int k, int column) {
#if defined(__aarch64__)
  int v = k / 8, quad = column / 4 * 16 * bits, at = column % 4 * 8 + k % 8;
  if (bits == 8) return {quad + v * 32 + at, 0, 0, 0};
  int low = quad + v / 2 * 32 + at;
  if (bits == 5) return {low, v % 2 * 4, quad + 64 + at % 16, v + at / 16 * 4};
  return {low, v % 2 * 4, quad + 64 + at, v * 2};
#else
  int v = k / 8 * 2 + k % 4 / 2, at = column * 4 + k % 8 / 4 + k % 2 * 2;
  if (bits == 8) return {v * 64 + at, 0, 0, 0};
  if (bits == 5) return {v / 2 * 64 + at, v % 2 * 4, 256 + at, v};
  return {v / 2 * 64 + at, v % 2 * 4, 256 + v / 4 * 64 + at, v % 4 * 2};
#endif
}

// A float16, as a float.
static inline float half_float(const char* at) {
  uint16_t bits;
  memcpy(&bits, at, 2);
  uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  uint32_t wide = magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : (magnitude << 13) + ((127 - 15) << 23);
  float made;
  memcpy(&made, &wide, 4);
  if (magnitude < 0x0400) made = float(magnitude) * 0x1p-24f;  // without an exponent
  return sign ? -made : made;
}

// Of inputs 16 half .. 16 half + 15 of a group's block: what codes of a column are multiplied by, and what is taken off.
struct GgmlScale {
  float step, least;
};

static inline GgmlScale ggml_scale(GgmlType type, const char* scales, int block, int half, int column) {
  float step = half_float(scales + column * 2);
  if (type == GgmlType::q6_k) {
    step *= float(int8_t(scales[128 + (2 * block + half) * 64 + column]));
    return {step, 32.0f * step};
  }
  if (!has_minima(type)) return {step, float(ggml_shape(type).offset) * step};
  auto six = [&](int i) { return int(uint8_t(scales[256 + i * 64 + column])); };
  int scale = block < 4 ? six(block) & 63 : (six(block + 4) & 15) | six(block - 4) >> 6 << 4;
  int least = block < 4 ? six(block + 4) & 63 : six(block + 4) >> 4 | six(block) >> 6 << 4;
  return {step * float(scale), half_float(scales + 128 + column * 2) * float(least)};
}

// The numbers of a row's group as a file has it, those that ggml's own de-quantisers make.
void read_ggml_group(GgmlType type, const uint8_t* group, float* numbers);
