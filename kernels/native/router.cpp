#include "router.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int ROWS = 8;  // tokens of one task

// The k highest of n values in descending order, the lower index first among equals. k is small.
void best(const float* value, int n, int k, int32_t* index) {
  int found = 0;
  for (int i = 0; i < n; i++) {
    if (found == k && !(value[i] > value[index[k - 1]])) continue;
    int at = found < k ? found++ : k - 1;
    for (; at > 0 && value[i] > value[index[at - 1]]; at--) index[at] = index[at - 1];
    index[at] = i;
  }
}

float group_value(const float* ranked, int n, int selection) {
  int32_t top[2] = {0, 0};
  best(ranked, n, std::min(n, 2), top);
  return selection == 1 && n > 1 ? ranked[top[0]] + ranked[top[1]] : ranked[top[0]];
}

void close_groups(float* ranked, int experts, const Rule& rule, float* value, int32_t* open) {
  int size = experts / rule.groups;
  for (int g = 0; g < rule.groups; g++) value[g] = group_value(ranked + g * size, size, rule.selection);
  best(value, rule.groups, rule.top_groups, open);
  for (int g = 0; g < rule.groups; g++)
    if (std::find(open, open + rule.top_groups, g) == open + rule.top_groups)
      std::fill(ranked + g * size, ranked + (g + 1) * size, rule.closed_value);
}

void score_all(const Isa& isa, float* score, int experts, int scoring) {
  if (scoring == 0) isa.sigmoid_all(score, experts);
  if (scoring == 1) {
    float total = isa.exp_all(score, *std::max_element(score, score + experts), experts);
    for (int e = 0; e < experts; e++) score[e] /= total;
  }
}

void weigh(const Isa& isa, const float* score, const int32_t* expert, const Rule& rule, float* weight) {
  for (int k = 0; k < rule.top_k; k++) weight[k] = score[expert[k]];
  if (rule.scoring == 2) {
    float total = isa.exp_all(weight, *std::max_element(weight, weight + rule.top_k), rule.top_k);
    for (int k = 0; k < rule.top_k; k++) weight[k] /= total;
  }
  float sum = rule.epsilon;
  for (int k = 0; k < rule.top_k; k++) sum += weight[k];
  float factor = rule.renormalise ? rule.scale / sum : rule.scale;
  for (int k = 0; k < rule.top_k; k++) weight[k] *= factor;
}

// A choice for logits that allow none: the row is found by what its experts' sum becomes.
void give_up(int top_k, int32_t* expert, float* weight) {
  for (int k = 0; k < top_k; k++) expert[k] = k, weight[k] = NAN;
}

}  // namespace

void choose(Engine& engine, float* logits, int tokens, int experts, const float* bias, const Rule& rule,
            int32_t* expert, float* weight) {
  const Isa& isa = *engine.isa;
  bool usable = !bias || std::none_of(bias, bias + experts, [](float b) { return b != b; });
  bool grouped = rule.groups > 1 && rule.selection != 0;
  engine.reserve((size_t(experts) + 2 * rule.groups) * sizeof(float));
  engine.pool.run((tokens + ROWS - 1) / ROWS, [&](int index, int thread) {
    float* ranked = engine.scratch<float>(thread);
    float* value = ranked + experts;
    for (int t = index * ROWS; t < std::min(tokens, (index + 1) * ROWS); t++) {
      float* score = logits + size_t(t) * experts;
      if (!usable || !isa.all_finite(score, experts)) {
        give_up(rule.top_k, expert + size_t(t) * rule.top_k, weight + size_t(t) * rule.top_k);
        continue;
      }
      score_all(isa, score, experts, rule.scoring);
      for (int e = 0; e < experts; e++) ranked[e] = bias ? score[e] + bias[e] : score[e];
      if (grouped) close_groups(ranked, experts, rule, value, reinterpret_cast<int32_t*>(value + rule.groups));
      best(ranked, experts, rule.top_k, expert + size_t(t) * rule.top_k);
      weigh(isa, score, expert + size_t(t) * rule.top_k, rule, weight + size_t(t) * rule.top_k);
    }
  });
}

void argmax(Engine& engine, const float* row, int rows, int size, int32_t* index) {
  engine.pool.run(rows, [&](int r, int) { index[r] = engine.isa->argmax(row + size_t(r) * size, size); });
}

template <class E>
void router_logits(Engine& engine, const E* x, size_t stride, int tokens, const E* gate, int experts, int hidden,
                   float* logits) {
  auto dot = engine.isa->of<E>().dot;
  engine.pool.run((tokens + ROWS - 1) / ROWS, [&](int index, int) {
    int end = std::min(tokens, (index + 1) * ROWS);
    for (int e = 0; e < experts; e++)
      for (int t = index * ROWS; t < end; t++)
        logits[size_t(t) * experts + e] = dot(x + t * stride, gate + size_t(e) * hidden, hidden);
  });
}

template <class E>
void router_logits_widened(Engine& engine, const E* x, size_t stride, int tokens, const float* gate, int experts,
                           int hidden, float* logits) {
  float* wide = engine.shared[0].at_least<float>(size_t(tokens) * hidden);
  for (int t = 0; t < tokens; t++)
    for (int h = 0; h < hidden; h++) wide[size_t(t) * hidden + h] = to_float(x[t * stride + h]);
  router_logits(engine, wide, hidden, tokens, gate, experts, hidden, logits);
}

template void router_logits_widened(Engine&, const bf16*, size_t, int, const float*, int, int, float*);
template void router_logits_widened(Engine&, const float*, size_t, int, const float*, int, int, float*);
template void router_logits(Engine&, const bf16*, size_t, int, const bf16*, int, int, float*);
template void router_logits(Engine&, const float*, size_t, int, const float*, int, int, float*);
