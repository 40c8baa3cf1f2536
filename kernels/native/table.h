// Collects the inner loops of the including file's instruction set into its table.
#pragma once
#include "attention_loops.h"
#include "delta_loops.h"
#include "fp8_loops.h"
#include "ggml_loops.h"
#include "int4_loops.h"
#include "int8_loops.h"
#include "loops.h"
#include "tile_panels.h"
#if VECTOR_BYTES == 64 && defined(__x86_64__)
#include "compact_loops.h"
#endif

namespace {

template <class E>
using Gemm = decltype(Loops<E>::gemm);

template <class E, Gemm<E> GEMM>
Loops<E> loops_of(decltype(Loops<E>::score_tiles) score_tiles = score_by_panel<E, GEMM>,
                  decltype(Loops<E>::add_values) add_values = values_by_panel<E, GEMM>,
                  decltype(Loops<E>::score) score = nullptr, bool in_place = false) {
  return {
      GEMM,
      [](const E* a, size_t stride, int rows, const Int8Panel& panel, int blocks, float* sum) {
        gemm_i8<E>(a, stride, rows, panel, blocks, sum, GEMM);
      },
      [](const E* a, size_t stride, int rows, const Int4Panel& panel, float* sum) {
        gemm_i4<E>(a, stride, rows, panel, sum, GEMM);
      },
      [](const E* a, size_t stride, int rows, const GgmlPanel& panel, float* sum) {
        gemm_ggml<E>(a, stride, rows, panel, sum, gemm_vector<float>);
      },
      store_sums<E>, gated_panel<E, silu>, gated_panel<E, gelu>, clamped_swiglu<E>, squared_relu<E>, gated<E>, rms_norm<E>, add_rows<E, E>, add_rows<E, float>, rope<E>, pack_keys<E>, score, in_place, score_tiles, add_values, softmax_at_once<E>, softmax_tiles<E>, pack_values, widen_row<E>, take_scales, scale_each<E>, widen_keys<E>, widen_values<E>, softmax<E>, dot<E>,
  };
}

Isa isa_of(const char* name, Loops<bf16> b, Loops<float> f, void (*enter)() = nothing, void (*leave)() = nothing) {
  Isa isa{name, b, f, add_scaled, add_rounded, scale_row, sum_scaled, sum_heads, exp_all, all_finite, argmax, sigmoid_all, silu_all, softplus_all, add_product, unit, delta_token, delta_channels, delta_sum, enter, leave, nullptr, nullptr, nullptr, widen_fp8, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#if VECTOR_BYTES == 64 && defined(__x86_64__)
  isa.compact = compact;
  isa.expand = expand;
#endif
  return isa;
}

}  // namespace
