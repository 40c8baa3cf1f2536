// The routed experts' FFN: rows grouped by slot, two products per group, weighted sums in float.
#pragma once
#include "engine.h"
#include "weights.h"

// Which rows go to which slot, in ascending (slot, row) order. A slot below 0 is skipped.
struct Grouping {
  struct Group {
    int slot, first, count;  // entries first .. first + count - 1
  };
  std::vector<Group> groups;
  std::vector<int> row;       // by entry
  std::vector<float> weight;  // by entry
  std::vector<char> first, last;  // by entry: whether no entry of the same row is before it, or after it
  std::vector<int> idle;          // rows without an entry
  std::vector<int> start, seen;  // by slot, by row; kept to save allocations

  void mark(int rows);
  void build(const int32_t* slot, const float* weight, int rows, int choices, int slots);
};

class Experts {
 public:
  // `groups` of int4 weights along the inputs of both products. `bias`: slots have biases of both. `places`: of how many
  // slots there is memory for the weights, if not of all; `put` says which those are.
  Experts(int slots, int hidden, int inner, Dtype dtype, const Groups& groups = {}, bool bias = false,
          const Gating& gating = {}, int places = Panels::NOWHERE);
  // Kept as ggml's types, one of gate and up, one of down.
  Experts(int slots, int hidden, int inner, GgmlType gate_up, GgmlType down, bool bias, const Gating& gating, int places);
  void put(int slot, int place);
  // A half without data stays as it is.
  void pack(int slot, const Source& gate_up, const Source& down);
  void pack_int4(int slot, const Int4Source& gate_up, const Int4Source& down);
  // `second` of gate_up: the first row of up.
  void pack_fp8(int slot, const Fp8Source& gate_up, const Fp8Source& down);
  void pack_ggml(int slot, const void* gate_up, const void* down);
  // (2 inner), gate over up, or (inner) without gates, and (hidden). Throws where slots have none.
  void set_bias(int slot, const float* gate_up, const float* down);

  int slots() const { return slots_; }
  int hidden() const { return hidden_; }
  int inner() const { return inner_; }
  size_t bytes() const { return gate_up_.bytes() + down_.bytes(); }

  // out[rows][hidden] = (out +) sum of weight * FFN_slot(x). Slots must be below `slots` and in memory; throws if not.
  template <class E, class O>
  void run(Engine& engine, const E* x, size_t stride, const int32_t* slot, const float* weight, int rows, int choices,
           O* out, size_t out_stride, bool add);

  // x[rows][hidden] += that sum, rounded once; rows of `normed` are as far apart. `bad` and `layer` as of add_sums.
  template <class E>
  void add_to(Engine& engine, const E* normed, const int32_t* slot, const float* weight, int rows, int choices, E* x,
              int32_t* bad, int layer);

 private:
  // `run`, but that end(row, panel, sum) takes what 64 columns of a row's experts add up to.
  template <class E, class O, class End>
  void compute(Engine& engine, const E* x, size_t stride, const int32_t* slot, const float* weight, int rows, int choices,
               O* out, size_t out_stride, bool add, const End& end);
  void check(int slot) const;
  void check_placed() const;
  // Inner columns of a panel of the first product.
  int width() const { return gating_.squared ? PANEL : PANEL / 2; }
  int gate_up_row(int column) const;
  int down_row(int column) const { return column < hidden_ ? column : -1; }

  int slots_, hidden_, inner_;
  Gating gating_;  // before what is made by it
  Panels gate_up_, down_;
  std::vector<float> gate_up_bias_, down_bias_;  // by slot and panel; empty without
  Grouping grouping_;
};
