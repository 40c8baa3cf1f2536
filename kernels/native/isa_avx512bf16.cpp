// The loops for processors with AVX-512 BF16.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#endif
#include <limits.h>
#define VECTOR_BYTES 64
#define GEMM_ROWS 6
#define GEMM_VECTORS 4
#define HAS_BF16_CONVERSION
#include "gemm_avx512fma.h"
#include "table.h"
#include "compact_avx512bf16.h"
#include "fp8_avx512bf16.h"

void to_bytes_avx512(const bf16*, int, const ByteRows&, int);                     // int8_vnni.cpp
void gemm_bytes_vnni(const ByteRows&, int, const Int8Panel&, float*, Next);
void to_words_vnni(const bf16*, int, const ByteRows&, int);  // int4_vnni.cpp
void gemm_words_vnni(const ByteRows&, int, const Int4Panel&, float*, Next);
void to_ggml_vnni(const bf16*, int, const ByteRows&, int);  // ggml_vnni.cpp
void gemm_ggml_vnni(const ByteRows&, int, const GgmlPanel&, float*, Next);
void to_codes_vnni(const bf16*, int, int, const CodeQueries&);  // codes_vnni.cpp
void score_codes_vnni(const CodeQueries&, const uint8_t* const*, int, size_t, int, const CodeScales&, float*, size_t, size_t);
void add_codes_vnni(bf16*, size_t, int, const uint8_t* const*, int, size_t, int, const float*, float*, size_t);
void widen_keys_vbmi(const void*, size_t, int, Bits, bf16*);  // codes_vbmi.cpp
void widen_values_vbmi(const void*, size_t, int, Bits, bf16*);

namespace {

Isa made_of(const char* name, const Loops<bf16>& loops, int word_rows) {
  Isa made = isa_of(name, loops, loops_of<float, gemm_vector<float>>());
  made.compact_few_rows = compact_dp;
  made.word_rows = word_rows;
  if (__builtin_cpu_supports("avx512vbmi")) made.b.widen_keys = widen_keys_vbmi, made.b.widen_values = widen_values_vbmi;
  if (__builtin_cpu_supports("avx512vnni")) {
    made.to_bytes = to_bytes_avx512, made.gemm_bytes = gemm_bytes_vnni;
    made.to_words = to_words_vnni, made.gemm_words = gemm_words_vnni;
    made.to_ggml = to_ggml_vnni, made.gemm_ggml = gemm_ggml_vnni;
    made.to_codes = to_codes_vnni, made.score_codes = score_codes_vnni, made.add_codes = add_codes_vnni;
  }
  return made;
}

}  // namespace

const Isa* avx512bf16_isa() {
  static const Isa isa = [] {
    Isa made = made_of("avx512bf16", loops_of<bf16, gemm_dp>(score_tiles_dp, add_values_dp, nullptr, true), INT_MAX);
    made.fp8_few_rows = fp8_few_dp;
    made.expand_blocks = MOST_EXPANDED;  // from the second cache 226 GFLOP/s, 4 at a time 221 (Zen 4, 3.7 GHz, 64 rows)
    return made;
  }();
  return &isa;
}

// The same bits with more speed where dot products are slow.
const Isa* avx512bf16fma_isa() {
  static const Isa isa = made_of("avx512bf16fma", loops_of<bf16, gemm_fma>(score_tiles_fma, add_values_fma, nullptr, true), FEW_ROWS);
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
