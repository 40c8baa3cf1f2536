#include "half.h"

#include <string.h>

#include "pointwise.h"
#include "rows.h"

template <class E>
void norm_before(Engine& engine, const HalfSteps& steps, const E* x, int tokens, int hidden, const void* weight, float eps, E* h) {
  if (steps.centred)
    centre_rows(engine, x, tokens, hidden, static_cast<const E*>(weight), static_cast<const E*>(steps.input_bias), eps, h);
  else
    rms_norm<E>(engine, x, hidden, tokens, hidden, static_cast<const E*>(weight), eps, h);
}

template <class E>
void open_heads(Engine& engine, const HalfSteps& steps, const E* h, int tokens, int heads, int size, E* seen) {
  if (!steps.opening) return;
  int gates = steps.opening->outputs();
  E* gate = engine.shared[3].at_least<E>(size_t(tokens) * gates);
  steps.opening->run(engine, h, steps.opening->inputs(), tokens, gate, gates);
  open_rows(engine, seen, tokens, heads, size, gate, gates, gates > heads, steps.softplus ? Opening::softplus : Opening::sigmoid);
}

template <class E>
void end_half(Engine& engine, const HalfSteps& steps, const HalfEnd<E>& e) {
  size_t hidden = e.hidden;
  if (steps.after_norm)
    rms_norm<E>(engine, e.y, hidden, e.tokens, e.hidden, static_cast<const E*>(steps.after_norm), e.eps, e.y);
  if (steps.parallel) {
    memcpy(e.normed, e.h, e.tokens * hidden * sizeof(E));
    add_sums<E, E>(engine, e.x, e.y, e.tokens, e.hidden, nullptr, 0);
  } else if (steps.centred) {
    add_sums<E, E>(engine, e.x, e.y, e.tokens, e.hidden, nullptr, 0);
    centre_rows(engine, e.x, e.tokens, e.hidden, e.post_norm, static_cast<const E*>(steps.post_bias), e.eps, e.normed);
  } else {
    add_rms_norm<E>(engine, e.x, e.y, e.tokens, e.hidden, e.post_norm, e.eps, e.normed);
  }
  route_half(engine, steps, e);
}

template <class E>
void route_half(Engine& engine, const HalfSteps& steps, const HalfEnd<E>& e) {
  if (!e.gate && !steps.wide_gate) return;
  const E* read = e.normed;
  if (steps.router_norm) {
    rms_norm<E>(engine, e.x, e.hidden, e.tokens, e.hidden, static_cast<const E*>(steps.router_norm), e.eps, e.y);
    read = e.y;
  }
  int experts = e.gate ? e.gate->outputs() : steps.experts, top_k = e.rule->top_k;
  float* logits = engine.shared[3].at_least<float>(size_t(e.tokens) * experts);
  if (e.gate)
    e.gate->run(engine, read, e.hidden, e.tokens, logits, experts);
  else
    router_logits_widened(engine, read, e.hidden, e.tokens, steps.wide_gate, experts, e.hidden, logits);
  choose(engine, logits, e.tokens, experts, e.bias, *e.rule, e.expert, e.weight);
  if (!steps.expert_scale) return;
  for (size_t i = 0; i < size_t(e.tokens) * top_k; i++) e.weight[i] *= steps.expert_scale[e.expert[i]];
}

#define FOR(E)                                                                                   \
  template void norm_before(Engine&, const HalfSteps&, const E*, int, int, const void*, float, E*); \
  template void open_heads(Engine&, const HalfSteps&, const E*, int, int, int, E*);              \
  template void route_half(Engine&, const HalfSteps&, const HalfEnd<E>&);                        \
  template void end_half(Engine&, const HalfSteps&, const HalfEnd<E>&);
FOR(bf16)
FOR(float)
