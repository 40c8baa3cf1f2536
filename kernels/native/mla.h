// The attention half of an MLA decoder layer in one call, its up-projections absorbed: norm, projections, latent norm,
// rotary embedding, cache write, attention over latents, output projection, residual, norm, router. The same loops as
// the single ops. Source: DeepSeek-V2 (arXiv 2405.04434, 2.1.2).
#pragma once
#include "half.h"
#include "indexer.h"
#include "near.h"
#include "rows.h"

// Norms are the caller's to keep alive. `q_norm` and `q_up` are null where queries have no rank of their own; `gate`
// and `bias` where there is no router.
struct MlaWeights {
  const void *input_norm, *q_norm, *latent_norm, *post_norm;
  std::shared_ptr<Linear> down, q_up;
  std::shared_ptr<HeadLinear> up_k, up_v;
  std::shared_ptr<Linear> out, gate;
  const float* bias;
  Rule rule;
  IndexerWeights index = {};
  HalfSteps steps = {};
};

// `nope` + `rope` elements make a head of queries, `rank` + `rope` a row of the cache, `value` a head of outputs.
struct MlaShape {
  int hidden, heads, nope, rope, value, rank;
  float eps, latent_eps, scale;
  IndexerShape index = {};
  bool reuses = false;  // attends what an earlier layer chose
};

template <class E>
struct MlaCall {
  E* x;  // (tokens, hidden), contiguous; becomes the residual stream after attention
  int tokens;
  Turn turn;
  const int64_t* kv_slot;
  Store<E> latents, index;
  E* normed;        // (tokens, hidden)
  int32_t* expert;  // (tokens, top_k), or null without a router
  float* weight;
  int32_t* slot;    // as of HalfRows
  int most;
  const NearRows* near;  // null where attention reads the cache itself
};

class MlaLayer {
 public:
  // Throws std::invalid_argument where sizes do not fit each other.
  MlaLayer(const MlaShape& shape, const MlaWeights& weights);

  template <class E>
  void run(Engine& engine, const MlaCall<E>& call, const Batch& batch) const;

 private:
  // Latents to their places in the cache, and the turned parts of queries beside where their latent parts go.
  template <class E>
  void place(Engine& engine, const MlaCall<E>& call, const E* down, const E* query, size_t query_stride, E* q) const;

  // What heads see: all of the context, or rows that were chosen.
  template <class E>
  void look(Engine& engine, const MlaCall<E>& call, const Batch& batch, const E* q, E* seen) const;

  MlaShape shape_;
  MlaWeights weights_;
};
