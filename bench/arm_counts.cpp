// One product of a row or a few with a panel of 64 columns, as afserve's loops for Arm make it, or, with LLAMA, one of
// llama.cpp's with 64 columns. `bench.arm_counts` counts its instructions: numbers are zeros, and nothing is printed.
//   program SET WEIGHTS INPUTS ROWS        program LOOP INPUTS
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <string>

namespace {

constexpr int COLUMNS = 64;
alignas(64) char weights[1 << 20], rows_of[1 << 20];
alignas(64) float sums[64 * COLUMNS], scales[COLUMNS];

}  // namespace

#ifdef LLAMA
// Of all rows at once, and of one.
using Gemv = void(int, float*, size_t, const void*, const void*, int, int);
using Dot = void(int, float*, size_t, const void*, size_t, const void*, size_t, int);
#define GEMVS(of)                                                                                                      \
  of(q8_0_4x4_q8_0) of(q8_0_4x8_q8_0) of(q4_0_4x4_q8_0) of(q4_0_4x8_q8_0) of(q4_0_8x8_q8_0) of(mxfp4_4x4_q8_0)         \
  of(q4_K_8x4_q8_K) of(q4_K_8x8_q8_K) of(q5_K_8x4_q8_K) of(q5_K_8x8_q8_K) of(q6_K_8x4_q8_K) of(q6_K_8x8_q8_K)
#define DOTS(of) of(bf16) of(q8_0_q8_0) of(q4_0_q8_0) of(q5_0_q8_0) of(mxfp4_q8_0) of(q4_K_q8_K) of(q5_K_q8_K) of(q6_K_q8_K)
#define GEMV(name) extern "C" Gemv ggml_gemv_##name;
#define DOT(name) extern "C" Dot ggml_vec_dot_##name;
GEMVS(GEMV)
DOTS(DOT)
#undef GEMV
#undef DOT
#define NAMED(name) {"ggml_gemv_" #name, ggml_gemv_##name},
const std::map<std::string, Gemv*> gemvs = {GEMVS(NAMED)};
#undef NAMED
#define NAMED(name) {"ggml_vec_dot_" #name, ggml_vec_dot_##name},
const std::map<std::string, Dot*> dots = {DOTS(NAMED)};
// What loops ask of the processor.
extern "C" int ggml_cpu_get_sve_cnt() { return 32; }
extern "C" int ggml_cpu_has_sve() { return 1; }
extern "C" int ggml_cpu_has_matmul_int8() { return 1; }

int main(int, char** given) {
  int inputs = atoi(given[2]);
  if (auto found = gemvs.find(given[1]); found != gemvs.end()) found->second(inputs, sums, 0, weights, rows_of, 1, COLUMNS);
  else
    for (int c = 0; c < COLUMNS; c++) dots.at(given[1])(inputs, sums + c, 0, weights, 0, rows_of, 0, 1);
}
#else
#include "ggml.h"
#include "int4.h"
#include "int8.h"
#include "isa.h"

int main(int, char** given) {
  const Isa* isa = find_isa(given[1]);
  if (!isa) return fprintf(stderr, "this processor has no %s\n", given[1]), 3;
  std::string kept = given[2];
  int inputs = atoi(given[3]), rows = atoi(given[4]);
  ByteRows a{reinterpret_cast<uint8_t*>(rows_of), 1 << 13, scales};
  const std::map<std::string, GgmlType> types = {{"Q4_0", GgmlType::q4_0}, {"Q5_0", GgmlType::q5_0}, {"Q8_0", GgmlType::q8_0},
                                                 {"Q4_K", GgmlType::q4_k}, {"Q5_K", GgmlType::q5_k}, {"Q6_K", GgmlType::q6_k}};
  Int4Panel codes{};
  codes.data = weights, codes.blocks = inputs / BLOCK, codes.group = 1, codes.e2m1 = kept == "MXFP4";
  if (kept == "bf16") isa->b.gemm((const bf16*)rows_of, 4096, rows, (const bf16*)weights, inputs / BLOCK, sums, false, {});
  else if (kept == "int8") isa->gemm_bytes(a, rows, {(const int8_t*)weights, inputs / INT8_INPUTS, scales, nullptr}, sums, {});
  else if (kept == "int4" || codes.e2m1) isa->gemm_words(a, rows, codes, sums, {});
  else isa->gemm_ggml(a, rows, {weights, inputs / BLOCK, types.at(kept)}, sums, {});
}
#endif
