// The half of a layer with a state in the place of keys and values (delta.h) in one call: norm, projections, convolution and
// rule, gate, output projection, residual, norm, router; or of one without either, which is norm and router.
#pragma once
#include <vector>

#include "delta.h"
#include "half.h"

// What rows are between projections: a gated delta net that forgets by head, or by channel; Mamba-2; a gated convolution.
enum class MixerKind { head, channel, sum, convolution, none };

// Weights are the caller's to keep alive. `down` makes, in this order, of kind head: queries, keys and values, the gate, shares
// and decays; channel: queries, keys and values, shares, and what `forget` and `open` make decays and the gate of, or, where
// they are null, these themselves; sum: values' mixture, gate, steps; convolution: three times its channels. `rate` and
// `step` are by decay; `floor` as of ChannelDeltaMixer, 0 for none. `norm` is of a value, or of kind sum of all of them, in
// `norm_groups`. A convolution's `net` has no keys, and `bias` of its channels is added behind the taps.
struct MixerWeights {
  MixerKind kind;
  DeltaNet net;
  std::shared_ptr<Linear> down, forget, open, out;
  const float *rate, *step, *bias;
  const void* norm;
  float floor;
  int norm_groups;
};

// `gate` is the router's, with what is its own; null without one.
struct StateWeights {
  int hidden;
  float eps;
  const void *input_norm, *post_norm;
  MixerWeights mixer;
  std::shared_ptr<Linear> gate;
  const float* bias;
  Rule rule;
};

// Between a half's projections: of T tokens what is mixed (T, channels), decays, shares (T, heads) and the gate (T, values).
template <class E>
struct StateRows {
  float *mixed, *decay, *beta;
  E* gate;
};

class StateHalf {
 public:
  // Throws std::invalid_argument where sizes do not fit each other.
  explicit StateHalf(const StateWeights& weights);

  int hidden() const { return weights_.hidden; }
  int top_k() const { return weights_.gate ? weights_.rule.top_k : 0; }

  // Over `states`; x (tokens, hidden) becomes the residual stream behind the mixer.
  template <class E>
  void run(Engine& engine, const States& states, const Batch& batch, const HalfRows& rows) const;

  // Its parts: up to the states, and from what was read of them, (tokens, values), which is overwritten.
  template <class E>
  void begin(Engine& engine, const E* x, int tokens, const StateRows<E>& to) const;
  template <class E>
  void end(Engine& engine, E* x, int tokens, float* read, const E* gate, const HalfRows& rows) const;

 private:
  int decays() const;
  int values() const { return weights_.mixer.net.value_heads * weights_.mixer.net.value; }
  template <class E>
  HalfEnd<E> end_of(const HalfRows& rows, E* x, E* y, int tokens) const;
  template <class E>
  void close_row(const Isa& isa, float* read, const E* gate, E* out) const;

  StateWeights weights_;
  std::vector<float> ones_;  // the weights of a norm without any
};
