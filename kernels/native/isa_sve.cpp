// The loops for Arm processors with SVE vectors of 32 bytes, BF16 and I8MM; what has no loop of its own is that of neonbf16.
#if defined(__aarch64__) && defined(__linux__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("sve,dotprod,i8mm,bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+sve+dotprod+i8mm+bf16")
#endif
#define VECTOR_BYTES 16
#define GEMM_ROWS 4
#define GEMM_VECTORS 4
#define HAS_BF16
#define HAS_DOTPROD
#define HAS_I8MM
#define HAS_SVE
#include "loops_sve.h"
#include "ggml_neon.h"
#include "table.h"

const Isa* sve_isa() {
  static const Isa isa =
      with_ggml(with_words(isa_of("sve", loops_of<bf16, gemm_sve>(), loops_of<float, gemm_vector<float>>())));
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
