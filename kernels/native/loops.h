// Inner loops in vector extensions, the same text for every instruction set. The including file chooses the
// set with a target pragma.
#pragma once
#include <math.h>

#include "gemm_vector.h"
#include "isa.h"
#include "vec.h"

namespace {

template <class E>
void store_sums(const float* sum, int rows, const float* bias, E* out, size_t stride, int columns) {
  for (int r = 0; r < rows; r++, sum += PANEL, out += stride) {
    for (int c = 0; c < columns; c += LANES) {
      f32v v = load(sum + c);
      if (bias) v += load(bias + c);
      if (columns - c >= LANES)
        store(out + c, v);
      else
        store_part(out + c, v, columns - c);
    }
  }
}

INLINE f32v silu(f32v x) { return x / (exp_lanes(-x) + 1.0f); }

// By its approximation with tanh: x sigmoid(sqrt(8 / pi) (x + 0.044715 x^3)).
INLINE f32v gelu(f32v x) { return x / (exp_lanes((x * x * x * 0.044715f + x) * -1.5957691216f) + 1.0f); }

template <class E, f32v (*UNIT)(f32v)>
void gated_panel(const float* sum, int rows, E* out, size_t stride) {
  for (int r = 0; r < rows; r++, sum += PANEL, out += stride) {
    for (int c = 0; c < 32; c += LANES) {
      const float* gate = sum + c / 16 * 32 + c % 16;
      store(out + c, UNIT(load(gate)) * load(gate + 16));
    }
  }
}

// NaN stays NaN: no comparison with it holds.
template <class E>
void clamped_swiglu(const float* sum, int rows, const Gating& g, E* out, size_t stride) {
  f32v most = splat(g.limit), least = splat(-g.limit);
  for (int r = 0; r < rows; r++, sum += PANEL, out += stride) {
    for (int c = 0; c < 32; c += LANES) {
      const float* at = sum + c / 16 * 32 + c % 16;
      f32v gate = load(at), up = load(at + 16);
      if (g.bounded) gate = silu(gate);
      gate = gate > most ? most : gate;
      up = up > most ? most : up < least ? least : up;
      store(out + c, g.bounded ? gate * up : gate / (exp_lanes(gate * -g.alpha) + 1.0f) * (up + 1.0f));
    }
  }
}

// NaN stays NaN here too.
template <class E>
void squared_relu(const float* sum, int rows, E* out, size_t stride) {
  f32v none = {};
  for (int r = 0; r < rows; r++, sum += PANEL, out += stride)
    for (int c = 0; c < PANEL; c += LANES) {
      f32v up = load(sum + c);
      store(out + c, up < none ? none : up * up);
    }
}

template <class E>
void gated(const E* gate, const E* up, int size, E* out) {
  for (int i = 0; i < size; i += LANES) {
    int n = size - i < LANES ? size - i : LANES;
    store_part(out + i, silu(load_part(gate + i, n)) * load_part(up + i, n), n);
  }
}

template <class E>
void rms_norm(const E* x, const E* weight, float eps, int size, E* out) {
  f32v squares = {};
  int full = size / LANES * LANES;
  for (int i = 0; i < full; i += LANES) {
    f32v v = load(x + i);
    squares += v * v;
  }
  if (full < size) {
    f32v v = load_part(x + full, size - full);
    squares += v * v;
  }
  float factor = 1.0f / __builtin_sqrtf(sum_lanes(squares) / size + eps);
  for (int i = 0; i < full; i += LANES) store(out + i, rounded(out, load(x + i) * factor) * load(weight + i));
  if (full < size) {
    int n = size - full;
    store_part(out + full, rounded(out, load_part(x + full, n) * factor) * load_part(weight + full, n), n);
  }
}

template <class E, class Y>
bool add_rows(E* x, const Y* y, int size) {
  Finite<E> even, odd;  // two, since each waits for what it took before
  int i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    even.store(x + i, load_shuffled(x + i) + load_shuffled(y + i), LANES);
    odd.store(x + i + LANES, load_shuffled(x + i + LANES) + load_shuffled(y + i + LANES), LANES);
  }
  for (; i < size; i += LANES) {
    int n = size - i < LANES ? size - i : LANES;
    even.store(x + i, load_part(x + i, n) + load_part(y + i, n), n);
  }
  return even.all() && odd.all();
}

template <class E>
void rope_split(const E* x, const float* cos, const float* sin, int half, E* out) {
  for (int i = 0; i < half; i += LANES) {
    int n = half - i < LANES ? half - i : LANES;
    f32v a = load_part(x + i, n), b = load_part(x + half + i, n);
    f32v c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(out + i, a * c - b * s, n);
    store_part(out + half + i, b * c + a * s, n);
  }
}

// x and out must not overlap.
template <class E>
void rope(const E* x, const float* cos, const float* sin, int half, bool interleaved, E* out) {
  if (!interleaved) return rope_split(x, cos, sin, half, out);
  E split[2 * LANES];
  for (int i = 0; i < half; i += LANES) {
    int n = half - i < LANES ? half - i : LANES;
    for (int j = 0; j < n; j++) split[j] = x[2 * (i + j)], split[LANES + j] = x[2 * (i + j) + 1];
    f32v a = load_part(split, n), b = load_part(split + LANES, n);
    f32v c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(out + i, a * c - b * s, n);
    store_part(out + half + i, b * c + a * s, n);
  }
}

template <class E>
float dot(const E* x, const E* y, int size) {
  f32v total = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) total += load(x + i) * load(y + i);
  if (i < size) total += load_part(x + i, size - i) * load_part(y + i, size - i);
  return sum_lanes(total);
}

// out may be base.
void add_scaled(float* out, const float* base, const float* row, float weight, int size) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, load(base + i) + load(row + i) * weight);
  for (; i < size; i++) out[i] = base[i] + row[i] * weight;
}

// The product is rounded to bf16 before it is added: a float sum of a few such numbers is exact unless they differ by
// more than 2^13, so it does not depend on their order, nor on how they are grouped. size: a multiple of LANES.
void add_rounded(float* out, const float* base, const float* row, float weight, int size) {
  for (int i = 0; i < size; i += LANES) store(out + i, load(base + i) + widen(narrow(load(row + i) * weight)));
}

void scale_row(float* row, float factor, int size) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) store(row + i, load(row + i) * factor);
  for (; i < size; i++) row[i] *= factor;
}

// `scale` times the sum of so many rows, `step` floats apart, each times its factor; nothing of a row whose factor is 0.
void sum_scaled(float* out, const float* rows, size_t step, int count, const float* factor, size_t factor_step, float scale,
                int size) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    f32v sum = {};
    for (int p = 0; p < count; p++) {
      float f = factor[p * factor_step];
      if (f != 0.0f) sum = sum + load(rows + p * step + i) * f;
    }
    store(out + i, sum * scale);
  }
  for (; i < size; i++) {
    float sum = 0.0f;
    for (int p = 0; p < count; p++) {
      float f = factor[p * factor_step];
      if (f != 0.0f) sum = sum + rows[p * step + i] * f;
    }
    out[i] = sum * scale;
  }
}

void sum_heads(const float* sums, const float* weight, int heads, float* score) {
  f32v none = {}, total[PANEL / LANES] = {};
  for (int h = 0; h < heads; h++, sums += PANEL) {
    f32v w = splat(weight[h]);
    for (int v = 0; v < PANEL / LANES; v++) {
      f32v sum = load(sums + v * LANES);
      total[v] += w * (sum < none ? none : sum);
    }
  }
  for (int v = 0; v < PANEL / LANES; v++) store(score + v * LANES, total[v]);
}

float exp_all(float* x, float top, int size) {
  f32v total = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    f32v v = exp_lanes(load(x + i) - top);
    store(x + i, v);
    total += v;
  }
  float sum = sum_lanes(total);
  for (; i < size; i++) {
    float lanes[LANES] = {x[i] - top};
    store(lanes, exp_lanes(load(lanes)));
    sum += x[i] = lanes[0];
  }
  return sum;
}

bool all_finite(const float* x, int size) {
  Finite<float> finite;
  for (int i = 0; i < size; i += LANES) finite.take(load_part(x + i, size - i < LANES ? size - i : LANES));
  return finite.all();
}

int argmax(const float* x, int size) {
  f32v best[2] = {splat(-INFINITY), splat(-INFINITY)};
  Finite<float> finite[2];
  int i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES)
    for (int j = 0; j < 2; j++) {
      f32v v = load(x + i + j * LANES);
      best[j] = maximum(v, best[j]);
      finite[j].take(v);
    }
  if (!finite[0].all() || !finite[1].all() || !all_finite(x + i, size - i)) return -1;
  float top = max_lanes(maximum(best[0], best[1]));
  for (; i < size; i++) top = x[i] > top ? x[i] : top;
  for (i = 0; i + LANES <= size; i += LANES)
    if (any_equal(load(x + i), top)) break;
  for (; i < size; i++)
    if (x[i] == top) return i;
  return 0;
}

void sigmoid_all(float* x, int size) {
  for (int i = 0; i < size; i += LANES) {
    int n = size - i < LANES ? size - i : LANES;
    store_part(x + i, 1.0f / (exp_lanes(-load_part(x + i, n)) + 1.0f), n);
  }
}

void nothing() {}

}  // namespace
