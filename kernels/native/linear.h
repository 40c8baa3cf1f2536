// Dense linear maps: y = x W^T + bias.
#pragma once
#include "engine.h"
#include "weights.h"

class Linear {
 public:
  Linear(int outputs, int inputs, Dtype dtype, const Groups& groups = {})
      : outputs_(outputs), weights_(1, outputs, inputs, dtype, groups) {}
  // Kept as ggml's types, one of each panel of 64 outputs or one of all.
  Linear(int outputs, int inputs, const std::vector<GgmlType>& types) : outputs_(outputs), weights_(1, outputs, inputs, types) {}
  void pack(const Source& source);
  void pack_int4(const Int4Source& source);
  void pack_ggml(const void* rows, int first, int count);  // outputs first .. first + count - 1
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
  HeadLinear(int heads, int outputs, int inputs, Dtype dtype, const Groups& groups = {})
      : heads_(heads), outputs_(outputs), weights_(heads, outputs, inputs, dtype, groups) {}
  void pack(int head, const Source& source);
  void pack_int4(int head, const Int4Source& source);

  int heads() const { return heads_; }
  int outputs() const { return outputs_; }
  int inputs() const { return weights_.inputs(); }
  size_t bytes() const { return weights_.bytes(); }

  // x (tokens, heads, inputs) and out (tokens, heads, outputs), both with strides.
  template <class E>
  void run(Engine& engine, const E* x, size_t token_stride, size_t head_stride, int tokens, E* out, size_t out_token,
           size_t out_head) const;

 private:
  int heads_, outputs_;
  Panels weights_;
};

// down(silu(gate(x)) * up(x)), rows of E; `gate_up` stacks gate over up.
template <class E>
void mlp(Engine& engine, const Linear& gate_up, const Linear& down, const E* x, size_t stride, int rows, E* out);
