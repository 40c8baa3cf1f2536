#include "states.h"

#include <string.h>

#include <stdexcept>
#include <string>

#include "carver.h"
#include "pointwise.h"
#include "rows.h"

namespace {

void expect(const char* what, int found, int wanted) {
  if (found != wanted)
    throw std::invalid_argument(std::string(what) + " " + std::to_string(found) + ", expected " + std::to_string(wanted));
}

template <class E>
void widen(const E* x, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = to_float(x[i]);
}

// decay = the logarithms of what states keep, of what projections made; beta is what is replaced or added.
void decide(const Isa& isa, const MixerWeights& w, int decays, float* decay, float* beta) {
  for (int i = 0; i < decays; i++) decay[i] += w.step[i];
  if (w.floor != 0.0f) {
    for (int i = 0; i < decays; i++) decay[i] *= w.rate[i];
    isa.sigmoid_all(decay, decays);
    for (int i = 0; i < decays; i++) decay[i] *= w.floor;
  } else {
    isa.softplus_all(decay, decays);
    if (w.kind == MixerKind::sum) memcpy(beta, decay, decays * sizeof(float));
    for (int i = 0; i < decays; i++) decay[i] *= w.rate[i];
  }
  if (w.kind != MixerKind::sum) isa.sigmoid_all(beta, w.net.value_heads);
}

}  // namespace

StateHalf::StateHalf(const StateWeights& weights) : weights_(weights) {
  const MixerWeights& w = weights_.mixer;
  if (w.kind == MixerKind::none) return;
  const DeltaNet& net = w.net;
  int direct = w.kind == MixerKind::channel && !w.forget ? decays() + values() : 0;
  int ranks = w.forget ? w.forget->inputs() + w.open->inputs() : 0;
  int wide = w.kind == MixerKind::convolution ? 3 * net.channels()
             : w.kind == MixerKind::head      ? net.channels() + values() + 2 * net.value_heads
             : w.kind == MixerKind::sum       ? net.channels() + values() + net.value_heads
                                              : net.channels() + net.value_heads + direct + ranks;
  expect("inputs of down", w.down->inputs(), weights_.hidden);
  expect("outputs of down", w.down->outputs(), wide);
  expect("inputs of out", w.out->inputs(), values());
  expect("outputs of out", w.out->outputs(), weights_.hidden);
  if (w.forget) expect("outputs of forget", w.forget->outputs(), decays());
  if (w.open) expect("outputs of open", w.open->outputs(), values());
  if (weights_.gate) expect("inputs of gate", weights_.gate->inputs(), weights_.hidden);
  if (w.kind == MixerKind::sum) ones_.assign(values() / w.norm_groups, 1.0f);
}

int StateHalf::decays() const {
  const MixerWeights& w = weights_.mixer;
  if (w.kind == MixerKind::convolution) return 0;
  return w.net.value_heads * (w.kind == MixerKind::channel ? w.net.key : 1);
}

template <class E>
void StateHalf::begin(Engine& engine, const E* x, int tokens, const StateRows<E>& to) const {
  const MixerWeights& w = weights_.mixer;
  size_t hidden = weights_.hidden, wide = w.down->outputs(), rows = tokens;
  int channels = w.net.channels(), heads = w.net.value_heads, decays = this->decays(), values = this->values();
  size_t second = w.forget ? decays : 0;
  Carver carver(engine.shared[4].at_least<char>(rows * (hidden + wide + second) * sizeof(E) + 3 * 64));
  E *h = carver.take<E>(rows * hidden), *all = carver.take<E>(rows * wide), *forget = carver.take<E>(rows * second);
  rms_norm<E>(engine, x, hidden, tokens, int(hidden), static_cast<const E*>(weights_.input_norm), weights_.eps, h);
  w.down->run(engine, h, hidden, tokens, all, wide);
  if (w.forget) {
    size_t at = channels + heads;
    w.forget->run(engine, all + at, wide, tokens, forget, decays);
    w.open->run(engine, all + at + w.forget->inputs(), wide, tokens, to.gate, values);
  }
  by_rows(engine, tokens, [&](size_t t) {
    const E* row = all + t * wide;
    float *mixed = to.mixed + t * channels, *decay = to.decay + t * decays, *beta = to.beta + t * heads;
    if (w.kind == MixerKind::convolution) {
      memcpy(to.gate + t * channels, row + channels, channels * sizeof(E));
      for (int c = 0; c < channels; c++) mixed[c] = rounded<E>(to_float(row[c]) * to_float(row[2 * channels + c]));
      return;
    }
    widen(row, channels, mixed);
    const E* rest = row + channels;
    if (w.kind == MixerKind::channel) {
      widen(rest, heads, beta);
      widen(w.forget ? forget + t * decays : rest + heads, decays, decay);
      if (!w.forget) memcpy(to.gate + t * values, rest + heads + decays, values * sizeof(E));
    } else {
      memcpy(to.gate + t * values, rest, values * sizeof(E));
      if (w.kind == MixerKind::head) widen(rest + values, heads, beta);
      widen(rest + values + (w.kind == MixerKind::head ? heads : 0), decays, decay);
    }
    decide(*engine.isa, w, decays, decay, beta);
  });
}

// What a token read, behind its norm and its gate.
template <class E>
void StateHalf::close_row(const Isa& isa, float* read, const E* gate, E* out) const {
  const MixerWeights& w = weights_.mixer;
  int count = values(), size = w.net.value;
  const E* norm = static_cast<const E*>(w.norm);
  if (w.kind == MixerKind::convolution) {
    for (int c = 0; c < count; c++) {
      float seen = rounded<E>(w.bias ? read[c] + w.bias[c] : read[c]);
      keep(out + c, to_float(gate[c]) * seen);
    }
    return;
  }
  constexpr int PART = 64;
  float open[PART];
  auto opened = [&](const auto& take) {  // calls take(place, number) of what the gate opens
    for (int from = 0; from < count; from += PART) {
      int n = count - from < PART ? count - from : PART;
      widen(gate + from, n, open);
      (w.kind == MixerKind::channel ? isa.sigmoid_all : isa.silu_all)(open, n);
      for (int i = 0; i < n; i++) take(from + i, open[i]);
    }
  };
  if (w.kind == MixerKind::sum) {
    opened([&](int i, float by) { read[i] *= by; });
    int group = count / w.norm_groups;
    for (int g = 0; g < w.norm_groups; g++) isa.f.rms_norm(read + g * group, ones_.data(), weights_.eps, group, read + g * group);
    for (int i = 0; i < count; i++) keep(out + i, rounded<E>(read[i]) * to_float(norm[i]));
    return;
  }
  for (int i = 0; i < count; i++) keep(out + i, read[i]);
  for (int at = 0; at < count; at += size) isa.of<E>().rms_norm(out + at, norm, weights_.eps, size, out + at);
  opened([&](int i, float by) { keep(out + i, to_float(out[i]) * by); });
}

template <class E>
HalfEnd<E> StateHalf::end_of(const HalfRows& rows, E* x, E* y, int tokens) const {
  const StateWeights& w = weights_;
  return {x, y, static_cast<E*>(rows.normed), tokens, w.hidden, static_cast<const E*>(w.post_norm), w.eps, nullptr, w.gate.get(),
          w.bias, &w.rule, rows.expert, rows.weight};
}

template <class E>
void StateHalf::end(Engine& engine, E* x, int tokens, float* read, const E* gate, const HalfRows& rows) const {
  size_t hidden = weights_.hidden, values = this->values();
  Carver carver(engine.shared[1].at_least<char>(tokens * (values + hidden) * sizeof(E) + 2 * 64));
  E *closed = carver.take<E>(tokens * values), *y = carver.take<E>(tokens * hidden);
  by_rows(engine, tokens, [&](size_t t) { close_row(*engine.isa, read + t * values, gate + t * values, closed + t * values); });
  weights_.mixer.out->run(engine, closed, values, tokens, y, hidden);
  end_half(engine, HalfSteps{}, end_of(rows, x, y, tokens));
}

template <class E>
void StateHalf::run(Engine& engine, const States& states, const Batch& batch, const HalfRows& rows) const {
  const MixerWeights& w = weights_.mixer;
  E* x = static_cast<E*>(rows.x);
  if (w.kind == MixerKind::none) {
    E* normed = static_cast<E*>(rows.normed);
    rms_norm<E>(engine, x, weights_.hidden, batch.tokens, weights_.hidden, static_cast<const E*>(weights_.post_norm), weights_.eps, normed);
    return route_half(engine, HalfSteps{}, end_of<E>(rows, x, nullptr, batch.tokens));
  }
  size_t tokens = batch.tokens, values = this->values(), heads = w.net.value_heads;
  size_t floats = w.net.channels() + decays() + heads + values;
  Carver carver(engine.shared[3].at_least<char>(tokens * (floats * sizeof(float) + values * sizeof(E)) + 5 * 64));
  StateRows<E> between{carver.take<float>(tokens * w.net.channels()), carver.take<float>(tokens * decays()),
                       carver.take<float>(tokens * heads), carver.take<E>(tokens * values)};
  float* read = carver.take<float>(tokens * values);
  begin(engine, x, batch.tokens, between);
  if (w.kind == MixerKind::convolution)
    convolve(engine, w.net, between.mixed, read, states, batch);
  else
    delta(engine, w.net, {between.mixed, between.decay, between.beta, read}, states, batch);
  end(engine, x, batch.tokens, read, between.gate, rows);
}

#define FOR(E)                                                                                            \
  template void StateHalf::run<E>(Engine&, const States&, const Batch&, const HalfRows&) const;           \
  template void StateHalf::begin(Engine&, const E*, int, const StateRows<E>&) const;                      \
  template void StateHalf::end(Engine&, E*, int, float*, const E*, const HalfRows&) const;
FOR(bf16)
FOR(float)
