// Float lanes in GCC vector extensions, as many as the including file's registers hold (VECTOR_BYTES). Included only
// inside a translation unit of one instruction set; everything is in an anonymous namespace, so that no two sets
// ever share a symbol.
#pragma once
#include "element.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES (VECTOR_BYTES / 4)
#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

namespace {

typedef float f32v __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t u16v __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t i8v __attribute__((vector_size(VECTOR_BYTES / 4)));

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

// The compilers' own conversions split a wide vector in halves; the processors have one instruction. (A target pragma
// does not define the compiler's feature macros; the width says which set this is.)
#if defined(__x86_64__) && VECTOR_BYTES == 64
INLINE u32v zero_extended(u16v v) { return (u32v)_mm512_cvtepu16_epi32((__m256i)v); }
INLINE u16v low_halves(u32v v) { return (u16v)_mm512_cvtepi32_epi16((__m512i)v); }
INLINE f32v widened(i8v v) { return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)v)); }
#elif defined(__x86_64__) && VECTOR_BYTES == 32
INLINE u32v zero_extended(u16v v) { return (u32v)_mm256_cvtepu16_epi32((__m128i)v); }
INLINE u16v low_halves(u32v v) { return __builtin_convertvector(v, u16v); }
INLINE f32v widened(i8v v) {
  int64_t bytes;
  memcpy(&bytes, &v, sizeof(v));
  return (f32v)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
}
#else
INLINE u32v zero_extended(u16v v) { return __builtin_convertvector(v, u32v); }
INLINE u16v low_halves(u32v v) { return __builtin_convertvector(v, u16v); }
INLINE f32v widened(i8v v) { return __builtin_convertvector(v, f32v); }
#endif

INLINE f32v widen(u16v v) { return (f32v)(zero_extended(v) << 16); }

// Round to nearest even; a NaN stays a NaN.
INLINE u16v narrow(f32v x) {
#ifdef HAS_BF16_CONVERSION
  return (u16v)_mm512_cvtneps_pbh((__m512)x);
#else
  u32v u = (u32v)x;
  u32v rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return low_halves(x != x ? (u >> 16) | 0x40u : rounded);
#endif
}

// As widen, in one shuffle rather than an extension and a shift: sums of rows are bound by such steps, products are not.
#if defined(__x86_64__) && VECTOR_BYTES == 64
INLINE f32v load_shuffled(const bf16* p) {
  const __m512i order = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  return (f32v)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, order, _mm512_castsi256_si512((__m256i)load_raw<u16v>(p)));
}
#else
INLINE f32v load_shuffled(const bf16* p) { return widen(load_raw<u16v>(p)); }
#endif
INLINE f32v load_shuffled(const float* p) { return load_raw<f32v>(p); }

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

// a > b ? a : b, and so b where either is no number.
#if defined(__x86_64__) && VECTOR_BYTES == 64
INLINE f32v maximum(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32v minimum(f32v a, f32v b) { return (f32v)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__x86_64__) && VECTOR_BYTES == 32
INLINE f32v maximum(f32v a, f32v b) { return (f32v)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE f32v minimum(f32v a, f32v b) { return (f32v)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE f32v maximum(f32v a, f32v b) { return a > b ? a : b; }
INLINE f32v minimum(f32v a, f32v b) { return a < b ? a : b; }
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (u32v){__VA_ARGS__})
#endif

// Lane j of the exchange of blocks of `d` lanes between two vectors: the new first one, the new second one.
constexpr uint32_t low_lane(uint32_t j, uint32_t d) { return j & d ? LANES + j - d : j; }
constexpr uint32_t high_lane(uint32_t j, uint32_t d) { return j & d ? LANES + j : j + d; }

template <uint32_t... J>
struct Lanes {
  template <int D, class V>
  static INLINE V low(V a, V b) {
    return SHUFFLE(a, b, low_lane(J, D)...);
  }
  template <int D, class V>
  static INLINE V high(V a, V b) {
    return SHUFFLE(a, b, high_lane(J, D)...);
  }
};
#if VECTOR_BYTES == 64
using All = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif VECTOR_BYTES == 32
using All = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using All = Lanes<0, 1, 2, 3>;
#endif

INLINE float sum_lanes(f32v v) {
  if (LANES > 8) v += All::high<LANES / 2>(v, v);
  if (LANES > 4) v += All::high<4>(v, v);
  v += All::high<2>(v, v);
  v += All::high<1>(v, v);
  return v[0];
}

INLINE float max_lanes(f32v v) {
  if (LANES > 8) v = maximum(v, All::high<LANES / 2>(v, v));
  if (LANES > 4) v = maximum(v, All::high<4>(v, v));
  v = maximum(v, All::high<2>(v, v));
  v = maximum(v, All::high<1>(v, v));
  return v[0];
}

// Whether any lane exceeds x; one that is no number does not.
INLINE bool any_above(f32v v, float x) {
#if defined(__x86_64__) && VECTOR_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_GT_OQ);
#elif defined(__x86_64__) && VECTOR_BYTES == 32
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(x), _CMP_GT_OQ));
#else
  return max_lanes(v) > x;
#endif
}

// Whether any lane is x.
INLINE bool any_equal(f32v v, float x) {
#if defined(__x86_64__) && VECTOR_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_EQ_OQ);
#elif defined(__x86_64__) && VECTOR_BYTES == 32
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(x), _CMP_EQ_OQ));
#else
  i32v same = v == x;
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= same[i];
  return any;
#endif
}

// e^x to about 2 ulp on [-87, 88], clamped outside (Cephes' polynomial); what is no number stays none.
INLINE f32v exp_lanes(f32v x) {
  x = minimum(splat(88.0f), maximum(splat(-87.0f), x));
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
  i32v power = ((i32v)shifted - (0x4b400000 - 127)) << 23;  // 2^n, normal for all of the range
  return p * (f32v)power;
}

// Stores rows and remembers whether everything stored was finite, as an E keeps it.
template <class E>
class Finite;

template <>
class Finite<float> {
 public:
  INLINE void store(float* p, f32v v, int n) {
    store_part(p, v, n);
    take(v);
  }
  INLINE void take(f32v v) { zero_ += v * 0.0f; }  // no number times zero is no number, nor is infinity
  INLINE bool all() const { return sum_lanes(zero_) == 0.0f; }

 private:
  f32v zero_ = {};
};

template <>
class Finite<bf16> {
 public:
#ifdef HAS_BF16_CONVERSION
  INLINE void store(bf16* p, f32v v, int n) {
    u16v kept = narrow(v);
    zero_ = (Half)_mm256_dpbf16_ps((__m256)zero_, (__m256bh)kept, (__m256bh)u16v{});
    memcpy(p, &kept, n * sizeof(bf16));
  }
  INLINE bool all() const { return _mm256_movemask_ps(_mm256_cmp_ps((__m256)zero_, (__m256)zero_, _CMP_UNORD_Q)) == 0; }

 private:
  typedef float Half __attribute__((vector_size(VECTOR_BYTES / 2)));
  Half zero_ = {};
#else
  INLINE void store(bf16* p, f32v v, int n) {
    u16v kept = narrow(v), size = kept & 0x7fff;
    most_ = size > most_ ? size : most_;
    memcpy(p, &kept, n * sizeof(bf16));
  }
  INLINE bool all() const { return sum_lanes(widen(most_) * 0.0f) == 0.0f; }

 private:
  u16v most_ = {};
#endif
};

}  // namespace
