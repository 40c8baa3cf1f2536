// Drafts by a layer of multi-token prediction: a pass over the rows of a step, then one row a sequence for each further
// token, all in one call. The same ops as one by one, so the same tokens.
#pragma once
#include "embedding.h"
#include "stack.h"

// Addresses are the caller's to keep alive. The norms (hidden), and the embedding's numbers, are of the layer's dtype;
// `join` takes an embedding and a hidden row, both normed, beside each other.
struct PredictorParts {
  Embedding embed;
  const void *embedding_norm, *hidden_norm, *last_norm;
  float eps, logit_scale;
  std::shared_ptr<Linear> join, head;
};

// Of a first pass over T tokens of S sequences, K the most that any drafts. Row t is made of `hidden` t and of the token
// that follows it.
template <class E>
struct DraftRows {
  const int64_t* token;
  const E* hidden;
  const int32_t* row;   // (S) the row that a sequence's draft begins behind
  const int32_t* place; // (S) where keys and values of the token behind it go
  const int32_t* most;  // (S) tokens that are drafted; 0: none
  int deepest;          // K
  float least;          // a draft ends where the product of its likelihoods falls below this
  int block_size;
  int32_t* drafted;  // (S, K), -1 behind a draft's end
  float* likely;     // (S, K), how likely each is by the layer itself
  int32_t* expert;   // (T + S (K - 1), top_k) at most, what the layer's router chose
};

class Predictor {
 public:
  // Throws std::invalid_argument where parts do not fit the layer.
  Predictor(PredictorParts parts, std::shared_ptr<Stack> layer);

  Dtype dtype() const { return layer_->dtype(); }

  // Rows that the layer computed. Keys and values of those behind the first pass are written where `batch`'s block tables
  // say; a draft ends where a table does.
  template <class E>
  int draft(Engine& engine, const Batch& batch, const DraftRows<E>& rows) const;

 private:
  PredictorParts parts_;
  std::shared_ptr<Stack> layer_;
  mutable Memory rows_, logits_;  // kept between calls, one of which runs at a time
};
