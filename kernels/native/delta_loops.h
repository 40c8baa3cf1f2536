// Inner loops of the rules that move states (delta.h), the same text for every instruction set. Sums over keys ascend.
#pragma once
#include "loops.h"

namespace {

void silu_all(float* x, int size) {
  for (int i = 0; i < size; i += LANES) {
    int n = size - i < LANES ? size - i : LANES;
    store_part(x + i, silu(load_part(x + i, n)), n);
  }
}

// log(1 + u) for u of e^-87 to e^20 (Cephes' polynomial); what is no number stays none.
INLINE f32v log1p_lanes(f32v u) {
  f32v y = u + 1.0f, less = y - 1.0f;
  i32v power = ((i32v)y - 0x3f3504f3) >> 23;
  f32v n = __builtin_convertvector(power, f32v), r = (f32v)((i32v)y - (power << 23)) - 1.0f;
  f32v p = r * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  f32v log = (p * r * r * r + n * -2.12194440e-4f) - r * r * 0.5f + r + n * 0.693359375f;
  return less == 0.0f ? u : log * (u / less);  // the share of u that y could not hold
}

void softplus_all(float* x, int size) {
  for (int i = 0; i < size; i += LANES) {
    int n = size - i < LANES ? size - i : LANES;
    f32v v = load_part(x + i, n);
    store_part(x + i, v > 20.0f ? v : log1p_lanes(exp_lanes(v)), n);
  }
}

void add_product(float* out, const float* a, const float* b, int size) {
  for (int i = 0; i < size; i += LANES) {
    int n = size - i < LANES ? size - i : LANES;
    store_part(out + i, load_part(out + i, n) + load_part(a + i, n) * load_part(b + i, n), n);
  }
}

void unit(float* x, int size, float length) { scale_row(x, length / __builtin_sqrtf(dot(x, x, size) + 1e-6f), size); }

void delta_token(float* state, int rows, const float* q, const float* k, const float* v, float keep, float share,
                 float* out) {
  constexpr int N = 4;
  for (int c = 0; c < PANEL; c += N * LANES) {
    f32v said[N] = {}, read[N] = {}, added[N];
    float* row = state + c;
    for (int i = 0; i < rows; i++, row += PANEL)
      for (int j = 0; j < N; j++) said[j] += load(row + j * LANES) * k[i];
    for (int j = 0; j < N; j++) added[j] = (load(v + c + j * LANES) - said[j] * keep) * share;
    row = state + c;
    for (int i = 0; i < rows; i++, row += PANEL)
      for (int j = 0; j < N; j++) {
        f32v kept = load(row + j * LANES) * keep + added[j] * k[i];
        store(row + j * LANES, kept);
        read[j] += kept * q[i];
      }
    for (int j = 0; j < N; j++) store(out + c + j * LANES, read[j]);
  }
}

void delta_channels(float* state, int rows, const float* q, const float* k, const float* v, const float* keep, float share,
                    float* out) {
  constexpr int N = 4;
  for (int c = 0; c < PANEL; c += N * LANES) {
    f32v said[N] = {}, read[N] = {}, added[N];
    float* row = state + c;
    for (int i = 0; i < rows; i++, row += PANEL)
      for (int j = 0; j < N; j++) said[j] += load(row + j * LANES) * (k[i] * keep[i]);
    for (int j = 0; j < N; j++) added[j] = (load(v + c + j * LANES) - said[j]) * share;
    row = state + c;
    for (int i = 0; i < rows; i++, row += PANEL)
      for (int j = 0; j < N; j++) {
        f32v kept = load(row + j * LANES) * keep[i] + added[j] * k[i];
        store(row + j * LANES, kept);
        read[j] += kept * q[i];
      }
    for (int j = 0; j < N; j++) store(out + c + j * LANES, read[j]);
  }
}

void delta_sum(float* state, int rows, const float* q, const float* k, const float* v, float keep, float share, float* out) {
  constexpr int N = 4;
  for (int c = 0; c < PANEL; c += N * LANES) {
    f32v read[N] = {}, added[N];
    for (int j = 0; j < N; j++) added[j] = load(v + c + j * LANES) * share;
    float* row = state + c;
    for (int i = 0; i < rows; i++, row += PANEL)
      for (int j = 0; j < N; j++) {
        f32v kept = load(row + j * LANES) * keep + added[j] * k[i];
        store(row + j * LANES, kept);
        read[j] += kept * q[i];
      }
    for (int j = 0; j < N; j++) store(out + c + j * LANES, read[j]);
  }
}

}  // namespace
