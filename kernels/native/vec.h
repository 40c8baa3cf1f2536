// Sixteen float lanes in GCC vector extensions. Included only inside a translation unit of one instruction
// set, within an anonymous namespace, so that no two sets ever share a symbol.
#pragma once
#include "element.h"

#define LANES 16
#define INLINE inline __attribute__((always_inline))

namespace {

typedef float f32v __attribute__((vector_size(64)));
typedef int32_t i32v __attribute__((vector_size(64)));
typedef uint32_t u32v __attribute__((vector_size(64)));
typedef uint16_t u16v __attribute__((vector_size(32)));
typedef int8_t i8v __attribute__((vector_size(16)));

INLINE f32v splat(float x) { return f32v{} + x; }

template <class V>
INLINE V load_raw(const void* p) {
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
INLINE void store_raw(void* p, V v) {
  memcpy(p, &v, sizeof(V));
}

INLINE f32v widen(u16v v) { return (f32v)(__builtin_convertvector(v, u32v) << 16); }

// Round to nearest even; a NaN stays a NaN.
INLINE u16v narrow(f32v x) {
  u32v u = (u32v)x;
  u32v rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return __builtin_convertvector(x != x ? (u >> 16) | 0x40u : rounded, u16v);
}

INLINE f32v load(const float* p) { return load_raw<f32v>(p); }
INLINE f32v load(const bf16* p) { return widen(load_raw<u16v>(p)); }
INLINE void store(float* p, f32v v) { store_raw(p, v); }
INLINE void store(bf16* p, f32v v) { store_raw(p, narrow(v)); }

template <class E>
INLINE f32v load_part(const E* p, int n) {
  if (n == LANES) return load(p);
  E lanes[LANES] = {};
  memcpy(lanes, p, n * sizeof(E));
  return load(lanes);
}

template <class E>
INLINE void store_part(E* p, f32v v, int n) {
  if (n == LANES) return store(p, v);
  E lanes[LANES];
  store(lanes, v);
  memcpy(p, lanes, n * sizeof(E));
}

// What a value becomes when it is stored as E and read again.
INLINE f32v rounded(const float*, f32v v) { return v; }
INLINE f32v rounded(const bf16*, f32v v) { return widen(narrow(v)); }

INLINE f32v maximum(f32v a, f32v b) { return a > b ? a : b; }

INLINE float sum_lanes(f32v v) {
  float x[LANES];
  store(x, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return x[0];
}

INLINE float max_lanes(f32v v) {
  float x[LANES];
  store(x, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}

// e^x to about 2 ulp on [-87, 88], clamped outside (Cephes' polynomial).
INLINE f32v exp_lanes(f32v x) {
  x = x > -87.0f ? x : splat(-87.0f);
  x = x < 88.0f ? x : splat(88.0f);
  f32v shifted = x * 1.44269504f + 12582912.0f;
  f32v n = shifted - 12582912.0f;
  f32v r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  i32v exponent = ((i32v)shifted - 0x4b400000) << 23;
  return (f32v)((i32v)p + exponent);
}

}  // namespace
