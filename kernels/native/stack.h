// The layers of a model over one cache, one after the other in one call: attention half, FFN half, residual. The same
// loops as the halves called one by one, so the same bits.
#pragma once
#include <memory>

#include "experts.h"
#include "half.h"
#include "linear.h"

// `gate_up` and `down` are a dense layer's FFN, or the shared expert; null where there is none. `experts` is null in a
// dense layer; expert e is in slot e.
struct StackLayer {
  AttentionHalf attention;
  std::shared_ptr<Linear> gate_up, down;
  std::shared_ptr<Experts> experts;
};

class Stack {
 public:
  // Throws std::invalid_argument where layers do not fit each other.
  explicit Stack(std::vector<StackLayer> layers);

  Dtype dtype() const { return layers_[0].attention.dtype; }

  // x (tokens, hidden), contiguous, becomes what the last layer gives. expert[l] (tokens, top_k) is what the router of MoE
  // layer l chose. `bad` as of add_sums. Returns the seconds that shared and routed experts took.
  template <class E>
  double run(Engine& engine, const Batch& batch, E* x, int32_t* expert, int32_t* bad) const;

 private:
  std::vector<StackLayer> layers_;
  int hidden_, top_k_ = 0;
};
