// The loops for any processor the compiler knows.
#define VECTOR_BYTES 16
#define GEMM_ROWS 2
#define GEMM_VECTORS 4
#include "table.h"

const Isa* generic_isa() {
  static const Isa isa = isa_of("generic", loops_of<bf16, gemm_vector<bf16>>(), loops_of<float, gemm_vector<float>>());
  return &isa;
}
