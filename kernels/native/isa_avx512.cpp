// The loops for processors with AVX-512 F, BW, DQ and VL.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#define GEMM_ROWS 6
#define GEMM_VECTORS 4
#include "table.h"

void to_bytes_avx512(const bf16*, int, const ByteRows&, int);  // int8_vnni.cpp
void gemm_bytes_vnni(const ByteRows&, int, const Int8Panel&, float*, Next);
void to_words_vnni(const bf16*, int, const ByteRows&, int);  // int4_vnni.cpp
void gemm_words_vnni(const ByteRows&, int, const Int4Panel&, float*, Next);
void to_ggml_vnni(const bf16*, int, const ByteRows&, int);  // ggml_vnni.cpp
void gemm_ggml_vnni(const ByteRows&, int, const GgmlPanel&, float*, Next);

const Isa* avx512_isa() {
  static const Isa isa = [] {
    Isa made = isa_of("avx512", loops_of<bf16, gemm_vector<bf16>>(), loops_of<float, gemm_vector<float>>());
    if (__builtin_cpu_supports("avx512vnni")) {
      made.to_bytes = to_bytes_avx512, made.gemm_bytes = gemm_bytes_vnni;
      made.to_words = to_words_vnni, made.gemm_words = gemm_words_vnni;
      made.to_ggml = to_ggml_vnni, made.gemm_ggml = gemm_ggml_vnni;
    }
    return made;
  }();
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
