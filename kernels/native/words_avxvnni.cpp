// Products of bytes (bytes_avx2.h, codes_avx2.h) for processors with AVX2 and AVX-VNNI: the same sums, with half of the instructions.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define VECTOR_BYTES 32
#define HAS_VNNI
#include "isa.h"
#include "codes_avx2.h"
#include "ggml_avx2.h"

void gemm_int8_bytes_vnni(const ByteRows& a, int rows, const Int8Panel& panel, float* sum, Next next) {
  gemm_int8_bytes(a, rows, panel, sum, next);
}

void gemm_int4_bytes_vnni(const ByteRows& a, int rows, const Int4Panel& panel, float* sum, Next next) {
  gemm_int4_bytes(a, rows, panel, sum, next);
}

void gemm_ggml_bytes_vnni(const ByteRows& a, int rows, const GgmlPanel& panel, float* sum, Next next) {
  gemm_ggml_bytes(a, rows, panel, sum, next);
}

void score_codes_words_vnni(const CodeQueries& q, const uint8_t* const* code, int tiles, size_t stride, int size, const CodeScales& scale,
                            float* score, size_t row, size_t step) {
  score_codes_avx2(q, code, tiles, stride, size, scale, score, row, step);
}

void add_codes_words_vnni(bf16* weights, size_t stride, int rows, const uint8_t* const* code, int tiles, size_t code_stride, int size,
                          const float* scale, float* sum, size_t panel_step) {
  add_codes_avx2(weights, stride, rows, code, tiles, code_stride, size, scale, sum, panel_step);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
