// The loops for Arm processors with BFDOT and matrix products of bytes (BF16 and I8MM of Armv8.6).
#if defined(__aarch64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod,i8mm,bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm+bf16")
#endif
#define VECTOR_BYTES 16
#define GEMM_ROWS 4
#define GEMM_VECTORS 4
#define HAS_BF16
#define HAS_DOTPROD
#define HAS_I8MM
#include "gemm_neon.h"
#include "table.h"
#include "ggml_neon.h"

const Isa* neonbf16_isa() {
  static const Isa isa =
      with_ggml(with_words(isa_of("neonbf16", loops_of<bf16, gemm_neon>(), loops_of<float, gemm_vector<float>>())));
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
