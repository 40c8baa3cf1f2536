// The attention half of a layer over its part of one cache, whatever it computes.
#pragma once
#include <functional>

#include "attention.h"

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

struct AttentionHalf {
  Dtype dtype;
  int hidden, top_k;  // top_k 0 without a router
  std::function<void(Engine&, const Batch&, const HalfRows&)> run;
};
