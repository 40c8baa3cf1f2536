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
