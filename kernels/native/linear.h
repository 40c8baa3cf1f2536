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
