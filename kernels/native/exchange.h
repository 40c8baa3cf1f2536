// A layer's routed experts on other nodes, for who computes all layers in one call: rows leave on the lanes of one
// micro-batch, and sums come back. Says what comm/m2n/link.py does of a dispatch while nothing goes wrong; whatever does is
// left where it is, for Python.
#pragma once
#include <optional>
#include <vector>

#include "flags.h"
#include "split.h"

class Exchange {
 public:
  // `lanes` by expert node, `routes` by MoE layer: both are the caller's to keep, as the board is. `sums` is what answers
  // travel in, and `patience` the seconds that a layer's may take.
  Exchange(FlagBoard& board, std::vector<size_t> lanes, std::vector<const Routes*> routes, uint32_t epoch, Dtype sums,
           double patience);

  size_t layers() const { return routes_.size(); }

  // Rows of `row_bytes` one after the other, which stay as they are until the sums are there. Throws where the mailboxes
  // hold others.
  void send(size_t layer, const void* x, int64_t row_bytes, const int32_t* expert, const float* weight, int64_t rows,
            int64_t choices);
  // Sums of all rows in float, in `own` or where they came; null where they did not all come as they should: then all of
  // the answers are still there.
  const float* sums(float* own, int64_t hidden);

  // Since the last `take_waited`: seconds in which only answers were waited for, and in which rows were under way.
  struct Spans {
    double waited = 0, under_way = 0;
  };
  Spans take_spans();

 private:
  struct Part {
    size_t node;
    uint32_t number;
    int64_t rows;
  };
  bool all_came();
  bool came(const Part& part) const;

  FlagBoard& board_;
  std::vector<size_t> lanes_;
  std::vector<const Routes*> routes_;
  uint32_t epoch_;
  Dtype sums_;
  double patience_;
  std::optional<RowSplit> split_;
  std::vector<Part> parts_;
  uint32_t layer_ = 0;
  int64_t rows_ = 0;
  FlagBoard::Clock::time_point sent_;
  Spans spans_;
};
