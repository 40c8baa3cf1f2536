// Element types of tensors and how 16 of them become float lanes. Plain GCC vector extensions, so the same
// text serves every instruction set; knows no operation. Functions are static: translation units of different
// instruction sets must never share one.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct bf16 {
  uint16_t bits;
};

// compact: bf16 weights in 12 bits (compact.h). i4: codes of 4 bits with a scale per group of inputs (int4.h).
// ggml: what GGUF files have (ggml.h). fp8: e4m3 in scaled blocks (fp8.h).
enum class Dtype : int { f32 = 0, bf16 = 1, i8 = 2, compact = 3, i4 = 4, ggml = 5, fp8 = 6 };

static inline size_t dtype_size(Dtype d) { return d == Dtype::f32 ? 4 : d == Dtype::bf16 ? 2 : 1; }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t u = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
