// The loops for any processor the compiler knows; on Arm those of NEON, which all have.
#define VECTOR_BYTES 16
#if defined(__aarch64__)
#define GEMM_ROWS 4
#else
#define GEMM_ROWS 2
#endif
#define GEMM_VECTORS 4
#include "table.h"
#if defined(__aarch64__)
#include "gemm_neon.h"
#include "ggml_neon.h"
#endif

const Isa* generic_isa() {
#if defined(__aarch64__)
  static const Isa isa =
      with_ggml(with_words(isa_of("generic", loops_of<bf16, gemm_neon>(), loops_of<float, gemm_vector<float>>())));
#else
  static const Isa isa = isa_of("generic", loops_of<bf16, gemm_vector<bf16>>(), loops_of<float, gemm_vector<float>>());
#endif
  return &isa;
}
