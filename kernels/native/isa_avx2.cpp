// The loops for processors with AVX2 and FMA.
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <cpuid.h>

#define VECTOR_BYTES 32
#define GEMM_ROWS 3
#define GEMM_VECTORS 4
#include "table.h"
#include "codes_avx2.h"
#include "compact_avx2.h"
#include "fp8_avx2.h"
#include "tiles_avx2.h"
#include "ggml_avx2.h"

void gemm_int8_bytes_vnni(const ByteRows&, int, const Int8Panel&, float*, Next);  // words_avxvnni.cpp
void gemm_int4_bytes_vnni(const ByteRows&, int, const Int4Panel&, float*, Next);
void gemm_ggml_bytes_vnni(const ByteRows&, int, const GgmlPanel&, float*, Next);
void score_codes_words_vnni(const CodeQueries&, const uint8_t* const*, int, size_t, int, const CodeScales&, float*, size_t, size_t);
void add_codes_words_vnni(bf16*, size_t, int, const uint8_t* const*, int, size_t, int, const float*, float*, size_t);

namespace {

// Leaf 7, sub-leaf 1, EAX: bit 4 AVX-VNNI.
bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

}  // namespace

const Isa* avx2_isa() {
  static const Isa isa = [] {
    Isa made = isa_of("avx2", loops_of<bf16, gemm_avx2>(score_tiles_avx2, add_values_avx2), loops_of<float, gemm_vector<float>>());
    made.compact = pack_avx2, made.expand = expand_avx2, made.compact_few_rows = compact_avx2;
    made.fp8_few_rows = fp8_few_avx2;
    made.to_bytes = row_to_code_bytes<true>, made.gemm_bytes = gemm_int8_bytes;
    made.to_words = row_to_code_bytes<false>, made.gemm_words = gemm_int4_bytes;
    made.to_ggml = row_to_code_bytes<false>, made.gemm_ggml = gemm_ggml_bytes;
    made.to_codes = to_codes_avx2, made.score_codes = score_codes_avx2, made.add_codes = add_codes_avx2;
    if (has_avx_vnni()) {
      made.gemm_bytes = gemm_int8_bytes_vnni;
      made.gemm_words = gemm_int4_bytes_vnni;
      made.gemm_ggml = gemm_ggml_bytes_vnni;
      made.score_codes = score_codes_words_vnni, made.add_codes = add_codes_words_vnni;
    }
    return made;
  }();
  return &isa;
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
