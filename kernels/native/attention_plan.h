// How one call's queries become tasks for threads, and splits of long contexts results again.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"

namespace {

// Sums are merged every 512 keys, counted from position 0. A token's result is then a function of its own position and
// context, whoever computes it, alone, in a batch or in a prefill.
constexpr int SPLIT = 512;
constexpr int MOST_ROWS = 128;  // query rows of one task, unless one token's group of heads is larger

struct Task {
  int sequence, group, groups;  // key/value heads group .. group + groups - 1
  int token, tokens;      // first query token, count
  int position;           // of the first query token
  int context;
  int first, last;        // keys
  size_t partial;         // offset of this task's sums in the shared partials
  int merge;              // that of its first group
};

// A run of tasks over the same query rows, one per split; `group` counts from the tasks' first.
struct Merge {
  int first, count, group;
};

// The sums that a task keeps of one of its key/value heads: `columns` of each row, and then of each row what they are
// relative to, e^top, and what its weights add up to.
struct Partial {
  float* at;
  int rows, columns;

  static size_t floats(int rows, int columns) { return (size_t(rows) * (columns + 2) + 15) / 16 * 16; }
  float* sums(int r) const { return at + size_t(r) * columns; }
  float& top(int r) const { return at[size_t(rows) * columns + 2 * r]; }
  float& total(int r) const { return at[size_t(rows) * columns + 2 * r + 1]; }
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Merge> merges;
  size_t partials = 0;
  int rows = 0;
};

int lowest_key(int position, int window) { return window && position + 1 > window ? position + 1 - window : 0; }

// How many key/value heads one task takes. They lie side by side in a block, so all of them make a longer read; but
// every thread must get something to do. No result depends on it.
int heads_together(const Batch& batch, int groups, int threads) {
  int pieces = 0;
  for (int s = 0; s < batch.sequences; s++) {
    if (batch.query_start[s + 1] - batch.query_start[s] != 1) return 1;
    pieces += (batch.context[s] + SPLIT - 1) / SPLIT;
  }
  return pieces >= threads ? groups : 1;
}

Plan plan(const Batch& batch, int groups, int together, int share, int columns, int window) {
  Plan plan;
  int step = std::max(1, MOST_ROWS / share);
  for (int s = 0; s < batch.sequences; s++) {
    int begin = batch.query_start[s], end = batch.query_start[s + 1], context = batch.context[s];
    for (int t = begin; t < end; t += step) {
      int n = std::min(step, end - t), position = context - (end - t);
      int from = lowest_key(position, window) / SPLIT * SPLIT, to = position + n;
      plan.rows = std::max(plan.rows, n * share);
      for (int g = 0; g < groups; g += together) {
        int merge = int(plan.merges.size());
        for (int i = 0; i < together; i++)
          plan.merges.push_back({int(plan.tasks.size()), (to - from + SPLIT - 1) / SPLIT, i});
        for (int key = from; key < to; key += SPLIT) {
          int last = std::min(key + SPLIT, to);
          plan.tasks.push_back({s, g, together, t, n, position, context, key, last, plan.partials, merge});
          plan.partials += together * Partial::floats(n * share, columns);
        }
      }
    }
  }
  return plan;
}

// Where runs of neighbouring tasks end, each of which one thread takes: it knows then what it will read next. Three
// quarters of the work in a run for each thread, then shorter ones, so that all end together.
std::vector<int> runs(const std::vector<Task>& tasks, int threads) {
  if (threads == 1) return {int(tasks.size())};
  auto work = [](const Task& task) { return size_t(task.last - task.first) * (task.tokens + 3); };
  size_t all = 0, done = 0, until = 0;
  for (const Task& task : tasks) all += work(task);
  std::vector<int> ends;
  for (size_t i = 0; i < tasks.size(); i++) {
    if (done >= until) {
      if (i) ends.push_back(int(i));
      until = done + (int(ends.size()) < threads ? all * 3 / (4 * threads) : all / (8 * threads));
    }
    done += work(tasks[i]);
  }
  ends.push_back(int(tasks.size()));
  return ends;
}

// Rows of a task are tokens, then the heads that share one key/value head: which head row r is.
template <class E>
int head_of(const Attention<E>& a, const Task& task, int group, int r) {
  int share = a.heads / a.groups;
  return (task.group + group) * share + r % share;
}

// Where row r of a task's result goes.
template <class E>
E* out_row(const Attention<E>& a, const Task& task, int group, int r) {
  size_t token = task.token + r / (a.heads / a.groups);
  return a.out + (token * a.heads + head_of(a, task, group, r)) * a.values.size;
}

}  // namespace
