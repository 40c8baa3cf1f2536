// Inner loops of paged attention over chunks of 64 keys: packing of keys and values, and the running softmax.
#pragma once
#include <math.h>

#include "isa.h"
#include "tiles.h"
#include "vec.h"

namespace {

template <int D>
INLINE void exchange(u32v* row) {
  for (int i = 0; i < LANES; i++) {
    if (i & D) continue;
    u32v a = row[i], b = row[i + D];
    row[i] = All::low<D>(a, b);
    row[i + D] = All::high<D>(a, b);
  }
}

INLINE void transpose(u32v* row) {
  if (LANES > 8) exchange<LANES / 2>(row);
  if (LANES > 4) exchange<4>(row);
  exchange<2>(row);
  exchange<1>(row);
}

// 16 rows by 64 bytes -> 16 lines of 64 bytes, the 32-bit words transposed.
template <class E>
INLINE void transpose_words(const E* const* rows, int first, int size, E* out) {
  constexpr int lane = 4 / sizeof(E);  // elements of a word
  for (int j = 0; j < 16; j += LANES) {
    for (int w = 0; w < 16; w += LANES) {
      int at = first + w * lane, n = size - at;
      u32v lines[LANES];
      for (int i = 0; i < LANES; i++) {
        lines[i] = u32v{};
        if (n >= LANES * lane)
          lines[i] = load_raw<u32v>(rows[j + i] + at);
        else if (n > 0)
          memcpy(&lines[i], rows[j + i] + at, n * sizeof(E));
      }
      transpose(lines);
      for (int i = 0; i < LANES; i++) store_raw(out + ((w + i) * 16 + j) * lane, lines[i]);
    }
  }
}

template <class E>
void pack_keys(const E* const* rows, int count, int size, int blocks, E* panel) {
  constexpr int words = 64 / sizeof(E);
  for (int b = 0; b < blocks; b++)
    for (int t = 0; t * 16 < count; t++)
      for (int k = 0; k < BLOCK; k += words)
        transpose_words(rows + t * 16, b * BLOCK + k, size, panel + b * PANEL_BLOCK + t * TILE + k * 16);
}

template <class V, class E>
INLINE V columns_of(const E* row, int first, int columns) {
  if (columns - first >= LANES) return load_raw<V>(row + first);
  E lanes[LANES] = {};
  if (columns > first) memcpy(lanes, row + first, (columns - first) * sizeof(E));
  return load_raw<V>(lanes);
}

void pack_values(const float* const* rows, int first, int columns, float* panel) {
  for (int k = 0; k < 64; k++)
    for (int c = 0; c < PANEL; c += LANES)
      store_raw(panel + k / BLOCK * PANEL_BLOCK + c / 16 * TILE + k % BLOCK * 16 + c % 16,
                columns_of<f32v>(rows[k], first + c, columns));
}

INLINE u32v pairs(u16v even, u16v odd) { return zero_extended(even) | (zero_extended(odd) << 16); }

void pack_values(const bf16* const* rows, int first, int columns, bf16* panel) {
  bool whole = columns - first >= PANEL;
  for (int p = 0; p < 32; p++) {
    const bf16 *even = rows[2 * p] + first, *odd = rows[2 * p + 1] + first;
    bf16* line = panel + p / 16 * PANEL_BLOCK + p % 16 * 32;
    for (int c = 0; whole && c < PANEL; c += LANES)
      store_raw(line + c / 16 * TILE + c % 16 * 2, pairs(load_raw<u16v>(even + c), load_raw<u16v>(odd + c)));
    for (int c = 0; !whole && c < PANEL; c += LANES)
      store_raw(line + c / 16 * TILE + c % 16 * 2,
                pairs(columns_of<u16v>(even, c, columns - first), columns_of<u16v>(odd, c, columns - first)));
  }
}

#if defined(__x86_64__) && VECTOR_BYTES == 64
INLINE f32v whole_numbers(i32v v) { return (f32v)_mm512_cvtepi32_ps((__m512i)v); }
INLINE u32v zero_extended(const uint8_t* code) { return (u32v)_mm512_cvtepu8_epi32(load_raw<__m128i>(code)); }
#elif defined(__x86_64__) && VECTOR_BYTES == 32
INLINE f32v whole_numbers(i32v v) { return (f32v)_mm256_cvtepi32_ps((__m256i)v); }
INLINE u32v zero_extended(const uint8_t* code) { return (u32v)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load_raw<int64_t>(code))); }
#else
INLINE f32v whole_numbers(i32v v) { return __builtin_convertvector(v, f32v); }
INLINE u32v zero_extended(const uint8_t* code) {
  u32v v;
  for (int i = 0; i < LANES; i++) v[i] = code[i];
  return v;
}
#endif

// What codes (eight.h) stand for.
INLINE f32v e4m3_numbers(u32v code) {
  u32v size = code & 0x7fu, large = (size << 20) + (120u << 23);
  u32v found = size < 8u ? (u32v)(whole_numbers((i32v)size) * 0x1p-9f) : large;
  found = size == 0x7fu ? u32v{} + 0x7fc00000u : found;
  return (f32v)(found | (code & 0x80u) << 24);
}
template <Bits BITS>
INLINE f32v numbers(const uint8_t* code) {
  if constexpr (BITS == Bits::int8) return widened(load_raw<i8v>(code));
  return e4m3_numbers(zero_extended(code));
}
// The same of one byte of every word.
template <Bits BITS, int BYTE>
INLINE f32v numbers(u32v word) {
  if constexpr (BITS == Bits::int8) return whole_numbers((i32v)(word << (24 - 8 * BYTE)) >> 24);
  return e4m3_numbers(word >> (8 * BYTE) & 0xffu);
}

template <Bits BITS, class E>
INLINE void widen_some(const uint8_t* code, int count, float scale, E* out) {
  for (; count >= LANES; count -= LANES, code += LANES, out += LANES) store(out, numbers<BITS>(code) * scale);
  if (count <= 0) return;
  uint8_t last[LANES] = {};
  memcpy(last, code, count);
  store_part(out, numbers<BITS>(last) * scale, count);
}

template <class E>
void widen_row(const void* codes, int count, Bits bits, float scale, E* out) {
  const uint8_t* code = static_cast<const uint8_t*>(codes);
  if (bits == Bits::int8)
    widen_some<Bits::int8>(code, count, scale, out);
  else
    widen_some<Bits::fp8>(code, count, scale, out);
}

void take_scales(const void* scales, size_t stride, int first, int end, float* keys, float* values) {
  const char* at = static_cast<const char*>(scales);
#if defined(__x86_64__) && VECTOR_BYTES == 64
  const __m256i step = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(int(stride)));
  const __m512i one = _mm512_i32gather_epi64(step, at, 1), two = _mm512_i32gather_epi64(step, at + 8 * stride, 1);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  first = first < 0 ? 0 : first > 16 ? 16 : first, end = end < 0 ? 0 : end > 16 ? 16 : end;
  const __mmask16 seen = __mmask16(((1u << end) - 1) & ~((1u << first) - 1));
  _mm512_storeu_si512(keys, _mm512_maskz_permutex2var_epi32(seen, one, even, two));
  _mm512_storeu_si512(values, _mm512_maskz_permutex2var_epi32(seen, one, _mm512_add_epi32(even, _mm512_set1_epi32(1)), two));
#else
  for (int i = 0; i < TILE_TOKENS; i++, at += stride) {
    memcpy(keys + i, at, sizeof(float));
    memcpy(values + i, at + sizeof(float), sizeof(float));
    if (i < first || i >= end) keys[i] = values[i] = 0.0f;
  }
#endif
}

template <class E>
void scale_each(E* x, const float* scale, int count) {
  for (int i = 0; i < count; i += LANES) store(x + i, load(x + i) * load(scale + i));
}

// Two numbers of LANES tokens or columns as words of bf16: nothing is cut off that a code has.
INLINE u32v pair_words(f32v first, f32v second) { return ((u32v)first >> 16) | ((u32v)second & 0xffff0000u); }

// Four codes of LANES tokens to their places in a tile's lines.
template <Bits BITS>
INLINE void store_word(u32v word, bf16* line) {
  store_raw(line, pair_words(numbers<BITS, 0>(word), numbers<BITS, 1>(word)));
  store_raw(line + 32, pair_words(numbers<BITS, 2>(word), numbers<BITS, 3>(word)));
}
template <Bits BITS>
INLINE void store_word(u32v word, float* line) {
  store(line, numbers<BITS, 0>(word));
  store(line + 16, numbers<BITS, 1>(word));
  store(line + 32, numbers<BITS, 2>(word));
  store(line + 48, numbers<BITS, 3>(word));
}

template <Bits BITS, class E>
INLINE void widen_some_keys(const uint8_t* rows, size_t stride, int words, E* tile) {
  for (int j = 0; j < TILE_TOKENS; j += LANES)
    for (int first = 0; first < words; first += LANES) {
      int n = words - first < LANES ? words - first : LANES;
      u32v lines[LANES];
      for (int i = 0; i < LANES; i++) {
        const uint8_t* from = rows + (j + i) * stride + 4 * first;
        lines[i] = u32v{};
        if (n == LANES)
          lines[i] = load_raw<u32v>(from);
        else
          memcpy(&lines[i], from, 4 * n);
      }
      transpose(lines);
      for (int i = 0; i < n; i++) store_word<BITS>(lines[i], tile + (first + i) * 64 + j * lane_of<E>());
    }
}

template <class E>
void widen_keys(const void* rows, size_t stride, int size, Bits bits, E* tile) {
  const uint8_t* code = static_cast<const uint8_t*>(rows);
  if (bits == Bits::int8)
    widen_some_keys<Bits::int8>(code, stride, size / 4, tile);
  else
    widen_some_keys<Bits::fp8>(code, stride, size / 4, tile);
}

template <Bits BITS>
INLINE void widen_line(const uint8_t* even, const uint8_t* odd, bf16* line) {
  for (int c = 0; c < 16; c += LANES) store_raw(line + 2 * c, pair_words(numbers<BITS>(even + c), numbers<BITS>(odd + c)));
}
template <Bits BITS>
INLINE void widen_line(const uint8_t* code, const uint8_t*, float* line) {
  for (int c = 0; c < 16; c += LANES) store(line + c, numbers<BITS>(code + c));
}

template <Bits BITS, class E>
INLINE void widen_some_values(const uint8_t* rows, size_t stride, int size, E* tile) {
  constexpr int lane = lane_of<E>();
  const int wide = 16 * value_width(size);
  for (int first = 0; first < size; first += wide)
    for (int t = 0; t < TILE_TOKENS; t += lane)
      for (int c = first; c < first + wide; c += 16, tile += 16 * lane)
        widen_line<BITS>(rows + t * stride + c, rows + (t + lane - 1) * stride + c, tile);
}

template <class E>
void widen_values(const void* rows, size_t stride, int size, Bits bits, E* tile) {
  const uint8_t* code = static_cast<const uint8_t*>(rows);
  if (bits == Bits::int8)
    widen_some_values<Bits::int8>(code, stride, size, tile);
  else
    widen_some_values<Bits::fp8>(code, stride, size, tile);
}

template <class E>
float softmax(const float* score, float scale, int low, int high, float* top, float* total, E* weight) {
  constexpr int vectors = PANEL / LANES;
  i32v lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  f32v s[vectors], best = splat(*top);
  i32v seen[vectors];
  for (int v = 0; v < vectors; v++) {
    s[v] = load(score + v * LANES) * scale;
    seen[v] = (lane + v * LANES >= low) & (lane + v * LANES < high);
    best = seen[v] ? maximum(best, s[v]) : best;
  }
  float peak = max_lanes(best);
  f32v sum = {};
  for (int v = 0; v < vectors; v++) {
    f32v w = seen[v] ? exp_lanes(s[v] - peak) : f32v{};
    store(weight + v * LANES, w);
    sum += w;
  }
  float kept = *top == peak ? 1.0f : exp_lanes(splat(*top - peak))[0];
  *total = *total * kept + sum_lanes(sum);
  *top = peak;
  return kept;
}

// e^(scale * (x - top)), as exactly as an E keeps it.
template <class E>
INLINE f32v weight_lanes(f32v x, float scale, float top) {
#if defined(__x86_64__) && VECTOR_BYTES == 64
  if constexpr (sizeof(E) == sizeof(bf16)) {
    // 2^t: the whole part goes to the exponent, a polynomial (minimax, 2^-13) has the rest.
    scale *= 1.44269504f;
    __m512 t = _mm512_fmsub_ps((__m512)x, _mm512_set1_ps(scale), _mm512_set1_ps(scale * top));
    __m512 part = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(part, _mm512_set1_ps(0.07802454f), _mm512_set1_ps(0.2260672f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.69583349f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.99992523f));
    return (f32v)_mm512_scalef_ps(p, t);
  }
#elif defined(__x86_64__) && VECTOR_BYTES == 32
  if constexpr (sizeof(E) == sizeof(bf16)) {  // the same polynomial
    scale *= 1.44269504f;
    __m256 t = (__m256)maximum(splat(-126.0f), x * scale - splat(scale * top));  // what is no number stays none
    __m256 whole = _mm256_floor_ps(t);
    f32v part = (f32v)_mm256_sub_ps(t, whole);
    f32v p = part * 0.07802454f + 0.2260672f;
    p = p * part + 0.69583349f;
    p = p * part + 0.99992523f;
    return (f32v)((i32v)p + ((i32v)_mm256_cvtps_epi32(whole) << 23));
  }
#endif
  return exp_lanes((x - top) * scale);
}

// The scores of row r, of whose keys low .. high - 1 are seen.
template <class E>
struct SeenScores {
  INLINE SeenScores(const TilesSoftmax<E>& s, int r, int low, int high)
      : score(s.score + r * s.row), step(s.step), low(low), high(high) {
    for (int i = 0; i < LANES; i++) lane[i] = i;
  }
  INLINE f32v at(int c) const { return load(score + c / PANEL * step + c % PANEL); }
  INLINE bool whole(int c) const { return low <= c && c + LANES <= high; }
  INLINE i32v seen(int c) const { return (lane + c >= low) & (lane + c < high); }
  INLINE f32v best(int first, int end) const {
    f32v best = splat(-INFINITY);
    for (int c = first; c < end; c += LANES) best = maximum(whole(c) ? at(c) : (seen(c) ? at(c) : best), best);
    return best;
  }

  const float* score;
  const size_t step;
  const int low, high;
  i32v lane;
};

// Sums so far are relative to e^(scale * top) and become relative to the highest of `best`. Where no score was seen yet
// they are nothing.
template <class E>
INLINE void raise_top(const TilesSoftmax<E>& s, int r, f32v best) {
  float peak = max_lanes(best), before = s.top[r];
  s.top[r] = peak;
  if (before == -INFINITY) return;
  float kept = exp_lanes(splat((before - peak) * s.scale))[0];
  for (int i = 0; i < 16; i++) s.total[r * 16 + i] *= kept;
  for (int p = 0; p < s.panels; p++)
    for (int c = 0; c < PANEL; c += LANES) {
      float* sum = s.sum + p * s.sum_step + r * PANEL + c;
      store(sum, load(sum) * kept);
    }
}

// Whether the top of row r would rise again, past the keys that may raise it; `first` and `later` are their best scores.
template <class E>
INLINE bool rises_later(const TilesSoftmax<E>& s, int r, f32v first, f32v later) {
  float top = any_above(first, s.top[r] + s.slack) ? max_lanes(first) : s.top[r];
  return any_above(later, top + s.slack);
}

template <class E>
INLINE void softmax_row(const TilesSoftmax<E>& s, int r, int from, int keys, int rise, int low, int high) {
  const SeenScores<E> scores(s, r, low, high);
  E* weight = s.weight + r * s.window;
  f32v best = scores.best(from, from + rise);
  if (any_above(best, s.top[r] + s.slack)) raise_top(s, r, best);
  float top = s.top[r], *total = s.total + r * 16;
  f32v sum = load(total);
  for (int c = from; c < keys; c += LANES) {
    f32v w = weight_lanes<E>(scores.at(c), s.scale, top);
    if (!scores.whole(c)) w = scores.seen(c) ? w : f32v{};
    store(weight + c, w);
    sum += w;
  }
  store(total, sum);
}

template <class E>
void softmax_tiles(const TilesSoftmax<E>& s, int first, int rows) {
  if (s.low)
    for (int r = first; r < first + rows; r++) softmax_row(s, r, s.from, s.keys, s.rise, s.low[r], s.high[r]);
  else if (s.keys == 16)
    for (int r = first; r < first + rows; r++) softmax_row(s, r, 0, 16, 16, 0, 16);
  else
    for (int r = first; r < first + rows; r++) softmax_row(s, r, s.from, s.keys, s.rise, 0, s.keys);
}

#if defined(__x86_64__) && VECTOR_BYTES == 64
INLINE void store_two(float* to, f32v a, f32v b) { store(to, a), store(to + LANES, b); }
INLINE void store_two(bf16* to, f32v a, f32v b) {
#ifdef HAS_BF16_CONVERSION
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
  store(to, a), store(to + LANES, b);
#endif
}

INLINE uint64_t ones(int n) { return n >= 64 ? ~0ull : n > 0 ? (1ull << n) - 1 : 0; }

// softmax_at_once for up to V vectors of scores, which are read once; ALL of which are seen, or those from low to high - 1.
template <class E, int V, bool ALL>
INLINE bool softmax_window(const TilesSoftmax<E>& s, int r, int low, int high) {
  const float* from = s.score + r * s.row;
  const uint64_t seen[2] = {ones(high) & ~ones(low), ones(high - 64) & ~ones(low - 64)};
  auto mask = [&](int v) { return __mmask16(seen[v / 4] >> v % 4 * LANES); };
  f32v score[V], later = splat(-INFINITY);
  for (int v = 0; v < V; v++) {
    const float* at = from + v / 4 * s.step + v % 4 * LANES;
    score[v] = ALL ? load(at) : (f32v)_mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask(v), at);
  }
  f32v first = maximum(score[0], later);
  for (int v = 1; v < V; v++) later = maximum(score[v], later);
  if (s.rise < s.keys) {
    if (rises_later(s, r, first, later)) return false;
  } else {
    first = maximum(first, later);
  }
  if (any_above(first, s.top[r] + s.slack)) raise_top(s, r, first);
  float top = s.top[r], *total = s.total + r * 16;
  f32v sum = load(total);
  for (int v = 0; v < V; v += 2) {
    f32v weight[2];
    for (int i = 0; i < 2; i++) {
      f32v w = weight_lanes<E>(score[v + i], s.scale, top);
      weight[i] = ALL ? w : (f32v)_mm512_maskz_mov_ps(mask(v + i), (__m512)w);
      sum += weight[i];
    }
    store_two(s.weight + r * s.window + v * LANES, weight[0], weight[1]);
  }
  store(total, sum);
  return true;
}
#endif

// `keys` are at most 128, and up to 16 weights past them may be written.
template <class E>
bool softmax_at_once(const TilesSoftmax<E>& s, int r) {
  int low = s.low ? s.low[r] : 0, high = s.low ? s.high[r] : s.keys;
#if defined(__x86_64__) && VECTOR_BYTES == 64
  if (s.rise == LANES || s.rise == s.keys) switch ((s.keys + 31) / 32) {
      case 1: return softmax_window<E, 2, false>(s, r, low, high);
      case 2: return softmax_window<E, 4, false>(s, r, low, high);
      case 3: return softmax_window<E, 6, false>(s, r, low, high);
      case 4: return low == 0 && high == 128 ? softmax_window<E, 8, true>(s, r, 0, 128) : softmax_window<E, 8, false>(s, r, low, high);
    }
#endif
  const SeenScores<E> scores(s, r, low, high);
  if (s.rise < s.keys && rises_later(s, r, scores.best(0, s.rise), scores.best(s.rise, s.keys))) return false;
  softmax_row(s, r, 0, s.keys, s.rise, low, high);
  return true;
}

}  // namespace
