// An expert node's turn while nothing but short dispatches of one box come: wait, check, compute, answer, again, in one
// call. Whatever else comes is left where it is, for the caller.
#pragma once
#include <memory>
#include <vector>

#include "experts.h"
#include "flags.h"

// The experts of all MoE layers, who computes them, and what rows and sums travel in.
class ExpertLayers {
 public:
  // Throws std::invalid_argument where the library computes no such sums of such rows.
  ExpertLayers(Engine& engine, std::vector<std::shared_ptr<Experts>> layers, Dtype rows, Dtype sums);
  void compute(size_t layer, const Task& task) const;

 private:
  template <class E, class O>
  void run(Experts& experts, const Task& task) const;

  Engine& engine_;
  std::vector<std::shared_ptr<Experts>> layers_;
  Dtype rows_, sums_;
};

// What is answered: dispatches of these epochs, of up to so many rows on each lane.
struct Answerable {
  std::vector<uint32_t> epochs;
  std::vector<int64_t> most_rows;
};

// Messages of one lane. Of the last one there are the header, and how many of the seconds of computing it took.
struct Answered {
  size_t lane = 0;
  int64_t messages = 0, rows = 0;
  double seconds = 0, last_seconds = 0;
  Header last = {};
};

// Waits `wait` seconds at most, and goes on for `serve` seconds from the first answer on. Returns early when there is
// something that it does not answer, or on a signal.
Answered answer(FlagBoard& board, const ExpertLayers& experts, const Answerable& which, double wait, double serve);
