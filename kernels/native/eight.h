// Rows of a cache in 8 bits (afserve/kernels/formats/eight_bits.py): a code for each number, and scales behind them.
//   key     codes, its scale, that of its value
//   value   codes
//   latent  codes, the scale of the first `rank` numbers, that of the others
// Codes are whole numbers -127 .. 127, or e4m3.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "element.h"

enum class Bits : int { whole = 0, int8 = 1, fp8 = 2 };

constexpr int SCALE_BYTES = 8;

static inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

static inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// Ties to even, of magnitudes up to 127 and 448.
static inline uint8_t int8_code(float x) {
  constexpr float whole = 12582912.0f;  // of a size from which on a float has no fraction
  return uint8_t(int8_t(int(x + whole - whole)));
}
static inline uint8_t fp8_code(float x) {
  constexpr float whole = 12582912.0f;
  uint32_t all = bits_of(x), size = all & 0x7fffffff;
  uint32_t small = uint32_t(int(float_of(size) * 512.0f + whole - whole));
  uint32_t large = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
  return uint8_t((size < bits_of(0x1p-6f) ? small : large) | (all >> 24 & 0x80));
}

// Codes of `size` numbers; returns their scale, which is NaN where one is not finite.
template <class E>
static float to_eight(const E* x, int size, Bits bits, uint8_t* code) {
  const float largest = bits == Bits::int8 ? 127.0f : 448.0f;
  float most = 0;
  bool finite = true;
  for (int i = 0; i < size; i++) {
    float a = fabsf(to_float(x[i]));
    finite &= a <= 3.402823466e38f;
    most = a > most ? a : most;
  }
  float scale = most / largest;
  if (!finite || !(scale > 0)) {
    memset(code, 0, size);
    return finite ? 0.0f : NAN;
  }
  for (int i = 0; i < size; i++) {
    float part = to_float(x[i]) / scale;
    part = part < -largest ? -largest : part > largest ? largest : part;
    code[i] = bits == Bits::int8 ? int8_code(part) : fp8_code(part);
  }
  return scale;
}

// The scales at the end of a row of so many codes.
struct Scales {
  float first, second;

  static Scales of(const void* row, int size) {
    Scales s;
    memcpy(&s, static_cast<const char*>(row) + size, SCALE_BYTES);
    return s;
  }
};
