// Dense linear maps: y = x W^T + bias.
#pragma once
#include "engine.h"
#include "weights.h"

class Linear {
 public:
  Linear(int outputs, int inputs, Dtype dtype) : outputs_(outputs), weights_(1, outputs, inputs, dtype) {}
  void pack(const Source& source);
  void set_bias(const Source& source);

  int outputs() const { return outputs_; }
  int inputs() const { return weights_.inputs(); }
  size_t bytes() const { return weights_.bytes(); }

  // out may have another element type than x.
  template <class E, class O>
  void run(Engine& engine, const E* x, size_t stride, int rows, O* out, size_t out_stride) const;

 private:
  int outputs_;
  Panels weights_;
  std::vector<float> bias_;
};

// One map per head: y[t][a] = x[t][a] W[a]^T. What MLA's absorbed projections are.
class HeadLinear {
 public:
  HeadLinear(int heads, int outputs, int inputs, Dtype dtype)
      : heads_(heads), outputs_(outputs), weights_(heads, outputs, inputs, dtype) {}
  void pack(int head, const Source& source);

  // x (tokens, heads, inputs) with strides, out contiguous.
  template <class E>
  void run(Engine& engine, const E* x, size_t token_stride, size_t head_stride, int tokens, E* out) const;

 private:
  int heads_, outputs_;
  Panels weights_;
};
