#include "pointwise.h"

#include <algorithm>

#include "rows.h"

namespace {

constexpr int PART = 64;  // numbers that a function takes at a time

// Calls work(from, count) for parts of `size` numbers.
template <class Work>
void by_parts(int size, const Work& work) {
  for (int from = 0; from < size; from += PART) work(from, std::min(PART, size - from));
}

// What the gate opens for up is bounded before that, after it, or not at all.
bool bounds(const Gating& g) { return g.clamped && !g.gelu; }
bool before(const Gating& g) { return bounds(g) && !g.bounded; }

// out = what multiplies up, rounded to E.
template <class E>
void unit(const Isa& isa, const Gating& g, const E* gate, int count, float* out) {
  float most = rounded<E>(g.limit);
  bool inside = before(g);
  float x[PART];
  for (int i = 0; i < count; i++) {
    x[i] = to_float(gate[i]);
    if (inside && x[i] > most) x[i] = most;
    out[i] = g.gelu ? (x[i] * x[i] * x[i] * 0.044715f + x[i]) * 1.5957691216f : inside ? rounded<E>(x[i] * g.alpha) : x[i];
  }
  isa.sigmoid_all(out, count);
  for (int i = 0; i < count; i++) {
    out[i] = rounded<E>(x[i] * (inside ? rounded<E>(out[i]) : out[i]));
    if (bounds(g) && !inside && out[i] > most) out[i] = most;
  }
}

template <class E>
void join_part(const Isa& isa, const Gating& g, const E* gate, const E* up, int count, E* out) {
  float open[PART], most = rounded<E>(g.limit);
  unit(isa, g, gate, count, open);
  for (int i = 0; i < count; i++) {
    float u = to_float(up[i]);
    if (bounds(g)) u = u > most ? most : u < -most ? -most : u;
    keep(out + i, open[i] * (before(g) ? rounded<E>(u + 1.0f) : u));
  }
}

}  // namespace

template <class E>
void open_rows(Engine& engine, E* x, int rows, int heads, int size, const E* gate, size_t stride, bool wide, Opening opening) {
  const Isa& isa = *engine.isa;
  int gates = wide ? heads * size : heads;
  by_rows(engine, rows, [&](size_t r) {
    by_parts(gates, [&](int from, int count) {
      float open[PART];
      for (int i = 0; i < count; i++) open[i] = to_float(gate[r * stride + from + i]);
      (opening == Opening::softplus ? isa.softplus_all : isa.sigmoid_all)(open, count);
      for (int i = 0; i < count; i++) {
        float by = rounded<E>(open[i]);
        E* to = x + r * heads * size + size_t(from + i) * (wide ? 1 : size);
        for (int d = 0; d < (wide ? 1 : size); d++) keep(to + d, to_float(to[d]) * by);
      }
    });
  });
}

template <class E>
void scale_row(E* x, int size, float factor) {
  for (int i = 0; i < size; i++) keep(x + i, to_float(x[i]) * factor);
}

template <class E>
void clip_row(E* x, int size, float most) {
  float bound = rounded<E>(most);
  for (int i = 0; i < size; i++) {
    float v = to_float(x[i]);
    keep(x + i, v > bound ? bound : v < -bound ? -bound : v);
  }
}

template <class E>
void scale_rows(Engine& engine, E* x, int rows, int size, float factor) {
  by_rows(engine, rows, [&](size_t r) { scale_row(x + r * size, size, factor); });
}

template <class E>
void join_rows(Engine& engine, const Gating& gating, const E* both, int rows, int inner, E* out) {
  const Isa& isa = *engine.isa;
  by_rows(engine, rows, [&](size_t r) {
    const E* row = both + r * inner * (gating.squared ? 1 : 2);
    E* to = out + r * inner;
    if (!gating.squared)
      return by_parts(inner, [&](int from, int count) { join_part(isa, gating, row + from, row + inner + from, count, to + from); });
    for (int i = 0; i < inner; i++) {
      float up = to_float(row[i]);
      keep(to + i, up < 0.0f ? 0.0f : up * up);
    }
  });
}

template <class E>
void round_rows(Engine& engine, const float* x, const E* y, int rows, int size, E* out) {
  by_rows(engine, rows, [&](size_t r) {
    for (size_t i = r * size; i < (r + 1) * size; i++) keep(out + i, y ? x[i] + to_float(y[i]) : x[i]);
  });
}

template <class E>
void centre_rows(Engine& engine, const E* x, int rows, int size, const E* weight, const E* bias, float eps, E* out) {
  constexpr int TOGETHER = 16;  // sums beside each other, in one order for any number of rows
  auto mean_of = [&](const E* row, const auto& number) {
    float part[TOGETHER] = {}, sum = 0;
    int whole = size / TOGETHER * TOGETHER;
    for (int i = 0; i < whole; i += TOGETHER)
      for (int j = 0; j < TOGETHER; j++) part[j] += number(to_float(row[i + j]));
    for (int i = whole; i < size; i++) part[i - whole] += number(to_float(row[i]));
    for (float each : part) sum += each;
    return sum / size;
  };
  by_rows(engine, rows, [&](size_t r) {
    const E* row = x + r * size;
    float mean = mean_of(row, [](float v) { return v; });
    float factor = 1.0f / __builtin_sqrtf(mean_of(row, [mean](float v) { return (v - mean) * (v - mean); }) + eps);
    for (int i = 0; i < size; i++) {
      float v = (to_float(row[i]) - mean) * factor * to_float(weight[i]);
      keep(out + r * size + i, bias ? v + to_float(bias[i]) : v);
    }
  });
}

void cap_rows(Engine& engine, float* x, int rows, int size, float cap) {
  const Isa& isa = *engine.isa;
  engine.pool.run(rows, [&](int r, int) {
    float* row = x + size_t(r) * size;
    for (int i = 0; i < size; i++) row[i] *= 2.0f / cap;
    isa.sigmoid_all(row, size);
    for (int i = 0; i < size; i++) row[i] = (row[i] * 2.0f - 1.0f) * cap;
  });
}

#define FOR(E)                                                                                          \
  template void open_rows(Engine&, E*, int, int, int, const E*, size_t, bool, Opening);                 \
  template void scale_row(E*, int, float);                                                              \
  template void clip_row(E*, int, float);                                                               \
  template void round_rows(Engine&, const float*, const E*, int, int, E*);                              \
  template void centre_rows(Engine&, const E*, int, int, const E*, const E*, float, E*);                \
  template void scale_rows(Engine&, E*, int, int, float);                                               \
  template void join_rows(Engine&, const Gating&, const E*, int, int, E*);
FOR(bf16)
FOR(float)
