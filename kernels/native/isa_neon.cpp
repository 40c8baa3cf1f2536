// The loops for Arm processors with dot products of bytes (Armv8.2).
#if defined(__aarch64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define VECTOR_BYTES 16
#define GEMM_ROWS 4
#define GEMM_VECTORS 4
#define HAS_DOTPROD
#include "gemm_neon.h"
#include "table.h"
#include "ggml_neon.h"

const Isa* neon_isa() {
  static const Isa isa =
      with_ggml(with_words(isa_of("neon", loops_of<bf16, gemm_neon>(), loops_of<float, gemm_vector<float>>())));
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
