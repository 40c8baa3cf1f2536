// The layers of a model over one cache, one after the other in one call: attention half, FFN half, residual. The same
// loops as the halves called one by one, so the same bits.
#pragma once
#include <memory>
#include <vector>

#include "exchange.h"
#include "experts.h"
#include "half.h"
#include "linear.h"

// What few families do behind an attention half; null, or one, where a model does not. Norms are the caller's to keep alive.
struct FfnSteps {
  std::shared_ptr<Linear> opening;  // one number of each row for the shared expert
  bool joined = false;              // as `gating` says, where that is no SwiGLU
  Gating gating = {};
  float scale = 1, row_scale = 1, eps = 0;  // of what the shared expert adds; of the row behind the layer
  // Norms of the row that the shared expert reads, of what it gives, of what experts give, and of all that is added.
  const void *before = nullptr, *after_shared = nullptr, *after_routed = nullptr, *after = nullptr;

  // Whether shared and routed experts are added together.
  bool at_once() const { return after || after_routed; }
};

// `gate_up` and `down` are a dense layer's FFN, or the shared expert; null where there is none, as in a layer that is
// attention alone. `experts` is null in a
// dense layer, and where the layer's experts are `away`, on other nodes; expert e is in slot e. `group` is that of its KV:
// its block table is the one of that number.
struct StackLayer {
  AttentionHalf attention;
  std::shared_ptr<Linear> gate_up, down;
  std::shared_ptr<Experts> experts;
  bool away = false;
  int group = 0;
  FfnSteps steps = {};

  bool routes() const { return experts || away; }
};

// x (tokens, hidden), contiguous, becomes what the last layer gives. expert[l] (tokens, top_k) is what the router of MoE
// layer l chose. `bad` as of add_sums. Where experts are away: `normed` (tokens, hidden) and `weight` (tokens, top_k) are
// memory for what is sent of a layer.
template <class E>
struct StackRows {
  E* x;
  int32_t *expert, *bad;
  E* normed = nullptr;
  float* weight = nullptr;
  int32_t* slot = nullptr;  // as of HalfRows
  int most = 0;
};

// How many layers were done: all of them, or as many as there were before one whose answers did not come as they should.
// That one has sent its rows, and lacks nothing but their sums. Seconds that shared and routed experts took; where these
// are away, that rows were under way, of which so many were only waited.
struct Stacked {
  int layers;
  double ffn_seconds, waited = 0;
};

class Stack {
 public:
  // Throws std::invalid_argument where layers do not fit each other.
  explicit Stack(std::vector<StackLayer> layers);

  Dtype dtype() const { return layers_[0].attention.dtype; }
  int hidden() const { return hidden_; }
  int top_k() const { return top_k_; }
  int moe_layers() const { return moe_layers_; }

  // The same tokens over the block table of each group of KV. `exchange` is for layers whose experts are away.
  template <class E>
  Stacked run(Engine& engine, const std::vector<const Batch*>& groups, StackRows<E> rows, Exchange* exchange = nullptr) const;

 private:
  void expect(const Exchange* exchange) const;
  // What a dense FFN or a shared expert gives.
  template <class E>
  void run_local(Engine& engine, const StackLayer& layer, const E* x, const E* normed, int rows, E* out) const;
  // x += shared and routed experts together, behind their norms. `beside` is overwritten.
  template <class E>
  void add_together(Engine& engine, const StackLayer& layer, const float* routed, E* beside, const StackRows<E>& rows,
                    int tokens, int at) const;

  std::vector<StackLayer> layers_;
  int hidden_, top_k_ = 0, moe_layers_ = 0;
  size_t groups_ = 1;
  size_t away_ = 0;  // layers whose experts are
};
