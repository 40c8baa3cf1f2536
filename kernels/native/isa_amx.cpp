// The loops for processors with AMX BF16.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#define GEMM_ROWS 6
#define GEMM_VECTORS 4
#define HAS_BF16_CONVERSION
#include "attention_loops.h"
#include "gemm_amx.h"
#include "table.h"

const Isa* amx_isa() {
  static const Isa isa = isa_of("amx", loops_of<bf16, gemm_tiles>(score_by_panel<bf16, gemm_tiles>, values_by_panel<bf16, gemm_tiles>, score_tiles), loops_of<float, gemm_vector<float>>(), enter_tiles, leave_tiles);
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
