// The attention half of a GQA decoder layer in one call: norm, projections, rotary embedding, cache write,
// attention, output projection, residual, norm, router. The same loops as the single ops, so the same bits.
#pragma once
#include "half.h"
#include "rows.h"

// Weights are the caller's to keep alive. Null where a model has none.
struct LayerWeights {
  const void *input_norm, *q_norm, *k_norm, *post_norm;
  std::shared_ptr<Linear> qkv, out, gate;
  const float* bias;   // of the router
  const float* sinks;  // attention.h
  Rule rule;
  HalfSteps steps;
};

// Norms of q and k, where a model has them, are of each head, or of all together if `wide`; before the rotary embedding, or
// after it if `late`, which wide ones never are.
struct LayerShape {
  int hidden, heads, groups, size;
  float eps, scale;
  int window;
  bool wide = false, late = false;
};

template <class E>
struct LayerCall {
  E* x;  // (tokens, hidden), contiguous; becomes the residual stream after attention
  int tokens;
  Turn turn;
  const int64_t* slot;
  Store<E> keys, values;
  E* normed;        // (tokens, hidden)
  int32_t* expert;  // (tokens, top_k), or null without a router
  float* weight;
};

class GqaLayer {
 public:
  GqaLayer(const LayerShape& shape, const LayerWeights& weights) : shape_(shape), weights_(weights) {}

  template <class E>
  void run(Engine& engine, const LayerCall<E>& call, const Batch& batch) const;

 private:
  template <class E>
  void place_heads(Engine& engine, const LayerCall<E>& call, E* qkv, E* q) const;

  LayerShape shape_;
  LayerWeights weights_;
};
