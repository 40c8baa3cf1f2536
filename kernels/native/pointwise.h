// Steps of attention halves and FFNs that few families have, number by number. Sigmoids and logarithms are the instruction
// set's, so a number has the same bits wherever it stands. What is rounded to E where says afserve/kernels/pointwise.py.
#pragma once
#include "engine.h"

static inline void keep(float* to, float x) { *to = x; }

// Round to nearest even; a NaN stays a NaN.
static inline void keep(bf16* to, float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  to->bits = uint16_t(x != x ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

template <class E>
static inline float rounded(float x) {
  E kept;
  keep(&kept, x);
  return to_float(kept);
}

enum class Opening { sigmoid, softplus };

// x (rows, heads, size) *= what the gate opens, rounded to E first. `gate` has a number for each head of a row or, if
// `wide`, for each of their numbers; rows of it are `stride` apart.
template <class E>
void open_rows(Engine& engine, E* x, int rows, int heads, int size, const E* gate, size_t stride, bool wide, Opening opening);

// One row: x *= factor, rounded once; x within -most and most, which is rounded first.
template <class E>
void scale_row(E* x, int size, float factor);
template <class E>
void clip_row(E* x, int size, float most);

template <class E>
void scale_rows(Engine& engine, E* x, int rows, int size, float factor);

// both (rows, gate before up, or up alone if squared) -> out (rows, inner), as `gating` joins them.
template <class E>
void join_rows(Engine& engine, const Gating& gating, const E* both, int rows, int inner, E* out);

// out = x, or x + y where there is a y, rounded once.
template <class E>
void round_rows(Engine& engine, const float* x, const E* y, int rows, int size, E* out);

// out = weight * (x - mean) / sqrt(variance + eps) + bias, in float, rounded once; a null bias is none.
template <class E>
void centre_rows(Engine& engine, const E* x, int rows, int size, const E* weight, const E* bias, float eps, E* out);

// x = cap tanh(x / cap).
void cap_rows(Engine& engine, float* x, int rows, int size, float cap);
