// Choice of experts from router logits; the meaning of every field is afserve.kernels.routing.RouterRule's.
#pragma once
#include "engine.h"

struct Rule {
  int top_k, scoring, selection, groups, top_groups;  // scoring 0 sigmoid, 1 softmax, 2 softmax over the chosen
  bool renormalise;                                   // selection 0 plain, 1 sum of two best, 2 best
  float epsilon, scale, closed_value;
};

// logits (tokens, experts), overwritten by the scores. Ties go to the lower expert. A token whose logits are not all
// finite gets experts 0 .. top_k - 1 and weights that are no numbers; every token does when the bias holds one.
void choose(Engine& engine, float* logits, int tokens, int experts, const float* bias, const Rule& rule,
            int32_t* expert, float* weight);

// The first of the highest of every row of `size` floats, -1 where any is not finite.
void argmax(Engine& engine, const float* row, int rows, int size, int32_t* index);

// x (tokens, hidden) times gate (experts, hidden), both of E -> logits in float.
template <class E>
void router_logits(Engine& engine, const E* x, size_t stride, int tokens, const E* gate, int experts, int hidden,
                   float* logits);

// The same with a float gate and rows of another type.
template <class E>
void router_logits_widened(Engine& engine, const E* x, size_t stride, int tokens, const float* gate, int experts,
                           int hidden, float* logits);
