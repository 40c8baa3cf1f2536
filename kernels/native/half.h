// The attention half of a layer over its part of one cache, whatever it computes.
#pragma once
#include <functional>
#include <memory>

#include "attention.h"
#include "linear.h"
#include "router.h"

// Elements of the half's own type. `x` (tokens, hidden), contiguous, becomes the residual stream after attention;
// `expert` and `weight` are (tokens, top_k), null where there is no router. `slot` (tokens, most) is what an indexer chose
// (indexer.h): its layer writes it, later ones may read it; null where every token attends all that it sees.
struct HalfRows {
  void *x, *normed;
  int32_t* expert;
  float* weight;
  int32_t* slot = nullptr;
  int most = 0;
};

// What few families do in an attention half (afserve/kernels/layer.py); null, or zero, where a model does not. Weights are
// the caller's to keep alive.
struct HalfSteps {
  std::shared_ptr<Linear> opening;  // of the normed row, for what heads saw: a number a head, or for each of its numbers
  bool softplus = false, parallel = false;
  float clip = 0;
  const void *after_norm = nullptr, *value_norm = nullptr, *router_norm = nullptr;
  const float *query_scale = nullptr, *expert_scale = nullptr;  // by position, by expert
  const float* wide_gate = nullptr;  // the router's (experts, hidden), where rows' dtype can't hold it
  int experts = 0;
  bool centred = false;  // norms subtract the mean
  const void *input_bias = nullptr, *post_bias = nullptr;
};

// The norm in front of a half.
template <class E>
void norm_before(Engine& engine, const HalfSteps& steps, const E* x, int tokens, int hidden, const void* weight, float eps, E* h);

// What heads saw, (tokens, heads, size), behind what the normed rows `h` open.
template <class E>
void open_heads(Engine& engine, const HalfSteps& steps, const E* h, int tokens, int heads, int size, E* seen);

// The end of a half: y (tokens, hidden), which is overwritten, is added to x; norm, and router if there is one.
template <class E>
struct HalfEnd {
  E *x, *y, *normed;
  int tokens, hidden;
  const E* post_norm;
  float eps;
  const E* h;  // the rows that attention read
  const Linear* gate;
  const float* bias;
  const Rule* rule;
  int32_t* expert;
  float* weight;
};

template <class E>
void end_half(Engine& engine, const HalfSteps& steps, const HalfEnd<E>& end);

// The router alone, of rows that are normed; nothing without one.
template <class E>
void route_half(Engine& engine, const HalfSteps& steps, const HalfEnd<E>& end);

struct AttentionHalf {
  Dtype dtype;
  int hidden, top_k;  // top_k 0 without a router
  std::function<void(Engine&, const Batch&, const HalfRows&)> run;
};
