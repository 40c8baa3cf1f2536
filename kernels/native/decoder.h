// Greedy decoding in one call: embedding, all layers, last norm, LM head and the likeliest token, pass after pass. The same
// ops as one by one, so the same tokens, keys and values.
#pragma once
#include "embedding.h"
#include "stack.h"

// Addresses are the caller's to keep alive. `last_norm` (hidden), and the embedding's numbers, are of the layers' dtype.
struct DecoderParts {
  Embedding embed;
  const void *last_norm, *last_bias;  // of a norm that is `centred`, and null where it has none
  bool centred;
  float eps, embedding_scale, logit_scale, logit_cap;  // cap 0: none
  int top;  // rows that indexers choose, 0 without one
  std::shared_ptr<Linear> head;
};

// Of S sequences, each with one row: what they begin with, and room for P passes of L MoE layers.
struct DecodeRows {
  const int64_t* token;  // (S)
  int passes;            // P
  const std::vector<std::vector<int>>& stops;  // by sequence: the pass that draws one of these is the last one
  const std::vector<int>& block_sizes;         // by group of KV
  int32_t* drawn;   // (P, S)
  int32_t* expert;  // (P, L, S, top_k), what the routers chose
};

// Passes that gave every sequence a token, and seconds that shared and routed experts took. `spoiled`: one more was begun.
struct Decoded {
  int passes;
  double ffn_seconds;
  bool spoiled;
};

class Decoder {
 public:
  // Throws std::invalid_argument where parts do not fit the layers.
  Decoder(DecoderParts parts, std::shared_ptr<Stack> layers);

  Dtype dtype() const { return layers_->dtype(); }

  // `groups` are the first pass, of which each sequence has one row; their tables have room for the other passes. It ends
  // before a pass in which a row or a logit is not finite, whose keys, values and states may be written then.
  template <class E>
  Decoded decode(Engine& engine, const std::vector<const Batch*>& groups, const DecodeRows& rows) const;

 private:
  DecoderParts parts_;
  std::shared_ptr<Stack> layers_;
  mutable Memory rows_, logits_, slots_;  // kept between calls, one of which runs at a time
};
