// The loops for processors with AMX, BF16 and INT8.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,amx-int8,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,amx-int8,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#define GEMM_ROWS 6
#define GEMM_VECTORS 4
#define HAS_BF16_CONVERSION
#include "attention_loops.h"
#include "codes_amx.h"
#include "gemm_amx.h"
#include "ggml_amx.h"
#include "int4_amx.h"
#include "int8_amx.h"
#include "table.h"

void to_ggml_vnni(const bf16*, int, const ByteRows&, int);  // ggml_vnni.cpp
void widen_keys_vbmi(const void*, size_t, int, Bits, bf16*);  // codes_vbmi.cpp
void widen_values_vbmi(const void*, size_t, int, Bits, bf16*);

const Isa* amx_isa() {
  static const Isa isa = [] {
    Isa made = isa_of("amx", loops_of<bf16, gemm_tiles>(score_by_panel<bf16, gemm_tiles>, values_by_panel<bf16, gemm_tiles>, score_tiles), loops_of<float, gemm_vector<float>>(), enter_tiles, leave_tiles);
    made.int4_fast = int4_amx;
    made.to_bytes = row_to_bytes;
    made.gemm_bytes = gemm_bytes_tiles;
    if (__builtin_cpu_supports("avx512vbmi")) made.b.widen_keys = widen_keys_vbmi, made.b.widen_values = widen_values_vbmi;
    if (__builtin_cpu_supports("avx512vnni")) {
      made.to_ggml = to_ggml_vnni, made.gemm_ggml = gemm_ggml_tiles;
      made.to_codes = to_codes_amx, made.score_codes = score_codes_amx, made.add_codes = add_codes_amx, made.code_block = CODE_BLOCK;
    }
    return made;
  }();
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
