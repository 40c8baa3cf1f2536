#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

namespace {

// Keys are taken 64 at a time and their sums merged every 512, both counted from position 0. A token's result is
// then a function of its own position and context, whoever computes it, alone, in a batch or in a prefill.
constexpr int CHUNK = 64;
constexpr int SPLIT = 512;
constexpr int MOST_ROWS = 64;  // query rows of one task, unless one token's group of heads is larger

struct Task {
  int sequence, group;
  int token, tokens;      // first query token, count
  int position;           // of the first query token
  int context;
  int first, last;        // keys
  size_t partial;         // offset of this task's sums in the shared partials
};

// A run of tasks over the same query rows: one per split.
struct Merge {
  int first, count;
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Merge> merges;
  size_t partials = 0;
  int rows = 0;
};

int lowest_key(int position, int window) { return window && position + 1 > window ? position + 1 - window : 0; }

Plan plan(const Batch& batch, int groups, int share, int columns, int window) {
  Plan plan;
  int step = std::max(1, MOST_ROWS / share);
  for (int s = 0; s < batch.sequences; s++) {
    int begin = batch.query_start[s], end = batch.query_start[s + 1], context = batch.context[s];
    for (int t = begin; t < end; t += step) {
      int n = std::min(step, end - t), position = context - (end - t);
      int from = lowest_key(position, window) / SPLIT * SPLIT, to = position + n;
      plan.rows = std::max(plan.rows, whole_groups(n * share));
      for (int g = 0; g < groups; g++) {
        plan.merges.push_back({int(plan.tasks.size()), (to - from + SPLIT - 1) / SPLIT});
        for (int key = from; key < to; key += SPLIT) {
          plan.tasks.push_back({s, g, t, n, position, context, key, std::min(key + SPLIT, to), plan.partials});
          plan.partials += size_t(n) * share * (columns + 2);
        }
      }
    }
  }
  return plan;
}

// One thread's working memory for tasks of up to `rows` query rows.
template <class E>
struct Workspace {
  E *queries, *keys, *values, *weights, *zero;
  float *scores, *sums, *top, *total;

  static size_t bytes(int rows, int key_blocks, int panels) {
    size_t elements = size_t(rows) * key_blocks * BLOCK + key_blocks * PANEL_BLOCK + 2 * PANEL_BLOCK + rows * PANEL +
                      key_blocks * BLOCK;
    return elements * sizeof(E) + sizeof(float) * (size_t(rows) * PANEL * (1 + panels) + 2 * rows) + 64;
  }

  Workspace(char* memory, int rows, int key_blocks, int panels) {
    keys = reinterpret_cast<E*>(memory);
    values = keys + key_blocks * PANEL_BLOCK;
    queries = values + 2 * PANEL_BLOCK;
    weights = queries + size_t(rows) * key_blocks * BLOCK;
    zero = weights + rows * PANEL;
    scores = reinterpret_cast<float*>(zero + key_blocks * BLOCK);
    sums = scores + rows * PANEL;
    top = sums + size_t(rows) * PANEL * panels;
    total = top + rows;
  }
};

// Where row r of a task's result goes: rows are tokens, then the heads that share one key/value head.
template <class E>
E* out_row(const Attention<E>& a, const Task& task, int r) {
  int share = a.heads / a.groups;
  size_t head = size_t(task.group) * share + r % share;
  return a.out + ((task.token + r / share) * size_t(a.heads) + head) * a.values.size;
}

template <class E>
class Worker {
 public:
  Worker(const Isa& isa, const Attention<E>& a, const Batch& batch, const Workspace<E>& w)
      : isa_(isa), loops_(isa.of<E>()), a_(a), batch_(batch), w_(w), share_(a.heads / a.groups) {}

  // False when the block table names a block that does not exist.
  bool sums(const Task& task) {
    rows_ = task.tokens * share_;
    blocks_ = (a_.keys.size + BLOCK - 1) / BLOCK;
    panels_ = (a_.values.size + PANEL - 1) / PANEL;
    take_queries(task);
    std::fill(w_.top, w_.top + rows_, -INFINITY);
    std::fill(w_.total, w_.total + rows_, 0.0f);
    padded_ = whole_groups(rows_);
    memset(w_.sums, 0, size_t(padded_) * PANEL * panels_ * sizeof(float));
    memset(w_.weights, 0, size_t(padded_) * PANEL * sizeof(E));
    memset(w_.zero, 0, size_t(blocks_) * BLOCK * sizeof(E));
    direct_ = can_score_directly();
    if (direct_) pack_queries();
    int lowest = lowest_key(task.position, a_.window);
    for (int key = task.first; key < task.last; key += CHUNK) {
      if (key + CHUNK <= lowest) continue;
      if (!point_at_keys(task, key, lowest)) return false;
      if (key + CHUNK < task.last) fetch(task, key + CHUNK);
      add_chunk(task, key);
    }
    return true;
  }

  // Bring a chunk near before it is needed: blocks lie anywhere, no processor guesses them.
  void fetch(const Task& task, int key) const {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    int high = std::min(key + CHUNK, task.last);
    for (int position = key; position < high;) {
      int offset = position % a_.block_size, block = table[position / a_.block_size];
      if (!exists(block)) return;
      int count = std::min(high - position, a_.block_size - offset);
      fetch_rows(at(a_.keys, task.group, block, offset), count, a_.keys);
      if (a_.values.data != a_.keys.data) fetch_rows(at(a_.values, task.group, block, offset), count, a_.values);
      position += count;
    }
  }

  // The only split: normalise and round.
  void write(const Task& task) {
    for (int r = 0; r < rows_; r++) {
      float factor = 1.0f / w_.total[r];
      for (int p = 0; p < panels_; p++) isa_.scale_row(w_.sums + (size_t(p) * padded_ + r) * PANEL, factor, PANEL);
    }
    for (int p = 0; p < panels_; p++) {
      int columns = std::min(PANEL, a_.values.size - p * PANEL);
      for (int n = 0; n < task.tokens; n++)
        loops_.store(w_.sums + (size_t(p) * padded_ + n * share_) * PANEL, share_, nullptr,
                     out_row(a_, task, n * share_) + p * PANEL, a_.values.size, columns);
    }
  }

  // One of several splits: keep top, total and sums of every row.
  void keep(const Task& task, float* partials) {
    int columns = a_.values.size;
    for (int r = 0; r < rows_; r++) {
      float* row = partials + task.partial + size_t(r) * (columns + 2);
      row[0] = w_.top[r];
      row[1] = w_.total[r];
      for (int p = 0; p < panels_; p++)
        memcpy(row + 2 + p * PANEL, w_.sums + (size_t(p) * padded_ + r) * PANEL,
               std::min(PANEL, columns - p * PANEL) * sizeof(float));
    }
  }

 private:
  void take_queries(const Task& task) {
    size_t wide = size_t(blocks_) * BLOCK;
    for (int r = 0; r < rows_; r++) {
      size_t head = size_t(task.group) * share_ + r % share_;
      E* to = w_.queries + r * wide;
      memcpy(to, a_.q + (task.token + r / share_) * a_.q_token + head * a_.q_head, a_.keys.size * sizeof(E));
      memset(to + a_.keys.size, 0, (wide - a_.keys.size) * sizeof(E));
    }
  }

  // Key and value rows of this chunk; null where no query row may look.
  bool point_at_keys(const Task& task, int key, int lowest) {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    int low = std::max(key, lowest), high = std::min(std::min(task.context, task.last), key + CHUNK);
    std::fill(key_row_, key_row_ + CHUNK, w_.zero);
    std::fill(value_row_, value_row_ + CHUNK, w_.zero);
    for (int position = low; position < high;) {
      int offset = position % a_.block_size, block = table[position / a_.block_size];
      if (!exists(block)) return false;
      int stop = std::min(high, position - offset + a_.block_size);
      const E* k = at(a_.keys, task.group, block, offset);
      const E* v = at(a_.values, task.group, block, offset);
      for (; position < stop; position++, k += a_.keys.token_stride, v += a_.values.token_stride) {
        key_row_[position - key] = k;
        value_row_[position - key] = v;
      }
    }
    if (direct_) point_at_tiles(task, key, low, high);
    return true;
  }

  // The four sixteens of this chunk's keys; where no row looks, one that some row does see.
  void point_at_tiles(const Task& task, int key, int low, int high) {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    for (int t = 0; t < CHUNK / 16; t++) {
      int position = std::clamp(key + t * 16, low / 16 * 16, (high - 1) / 16 * 16);
      tile_[t] = at(a_.keys, task.group, table[position / a_.block_size], position % a_.block_size);
    }
  }

  static void fetch_rows(const E* row, int count, const Cache<E>& cache) {
    constexpr int line = 64 / sizeof(E);
    for (; count > 0; count--, row += cache.token_stride)
      for (int i = 0; i < cache.size; i += line) __builtin_prefetch(row + i);
  }

  bool exists(int block) const { return block >= 0 && block < a_.blocks; }

  static const E* at(const Cache<E>& cache, int group, int block, int token) {
    return cache.data + block * cache.block_stride + group * cache.group_stride + token * cache.token_stride;
  }

  // Sixteen keys of a block are one tile where they lie, unless the processor has no tiles.
  bool can_score_directly() const {
    return loops_.score && rows_ <= ROW_GROUP && a_.block_size % 16 == 0 && a_.keys.size % BLOCK == 0;
  }

  void pack_queries() {
    const E* rows[ROW_GROUP];
    for (int r = 0; r < ROW_GROUP; r++) rows[r] = r < rows_ ? w_.queries + size_t(r) * blocks_ * BLOCK : w_.zero;
    loops_.pack_keys(rows, ROW_GROUP, a_.keys.size, blocks_, w_.keys);
  }

  void score_chunk() {
    if (!direct_) {
      loops_.pack_keys(key_row_, CHUNK, a_.keys.size, blocks_, w_.keys);
      loops_.gemm(w_.queries, size_t(blocks_) * BLOCK, rows_, w_.keys, blocks_, w_.scores, false);
      return;
    }
    loops_.score(w_.keys, tile_, a_.keys.token_stride, blocks_, w_.scores);
  }

  void add_chunk(const Task& task, int key) {
    score_chunk();
    for (int r = 0; r < rows_; r++) {
      int position = task.position + r / share_;
      int low = std::clamp(lowest_key(position, a_.window) - key, 0, CHUNK);
      int high = std::clamp(position + 1 - key, 0, CHUNK);
      float kept = loops_.softmax(w_.scores + r * PANEL, a_.scale, low, high, w_.top + r, w_.total + r,
                                  w_.weights + r * PANEL);
      if (kept == 1.0f) continue;
      for (int p = 0; p < panels_; p++) isa_.scale_row(w_.sums + (size_t(p) * padded_ + r) * PANEL, kept, PANEL);
    }
    for (int p = 0; p < panels_; p++) {
      loops_.pack_values(value_row_, p * PANEL, a_.values.size, w_.values);
      loops_.gemm(w_.weights, PANEL, rows_, w_.values, 2, w_.sums + size_t(p) * padded_ * PANEL, true);
    }
  }

  const Isa& isa_;
  const Loops<E>& loops_;
  const Attention<E>& a_;
  const Batch& batch_;
  const Workspace<E> w_;
  const int share_;
  int rows_ = 0, padded_ = 0, blocks_ = 0, panels_ = 0;
  bool direct_ = false;
  const E *key_row_[CHUNK], *value_row_[CHUNK], *tile_[CHUNK / 16] = {};
};

// Splits of one row into its result: the sums, each scaled to the highest score, over the weights' total.
template <class E>
void merge_row(const Isa& isa, const float* partials, size_t step, int count, int columns, float* row, E* out) {
  float top = -INFINITY, total = 0;
  for (int i = 0; i < count; i++) top = std::max(top, partials[i * step]);
  std::fill(row, row + columns, 0.0f);
  for (int i = 0; i < count; i++) {
    const float* part = partials + i * step;
    if (part[1] == 0.0f) continue;
    float factor[1] = {part[0]};
    isa.exp_all(factor, top, 1);
    total += part[1] * factor[0];
    isa.add_scaled(row, part + 2, factor[0], columns);
  }
  isa.scale_row(row, 1.0f / total, columns);
  for (int c = 0; c < columns; c += PANEL)
    isa.of<E>().store(row + c, 1, nullptr, out + c, PANEL, std::min(PANEL, columns - c));
}

}  // namespace

template <class E>
void attend(Engine& engine, const Attention<E>& a, const Batch& batch) {
  const Isa& isa = *engine.isa;
  int share = a.heads / a.groups, columns = a.values.size;
  int key_blocks = (a.keys.size + BLOCK - 1) / BLOCK, panels = (columns + PANEL - 1) / PANEL;
  Plan todo = plan(batch, a.groups, share, columns, a.window);
  if (todo.tasks.empty()) return;
  engine.reserve(Workspace<E>::bytes(todo.rows, key_blocks, panels));
  bool split = todo.tasks.size() != todo.merges.size();
  float* partials = split ? engine.shared[2].at_least<float>(todo.partials) : nullptr;
  std::atomic<bool> bad{false};

  auto count_of = [&](int m) { return todo.merges[m].count; };
  std::vector<bool> alone(todo.tasks.size());
  for (size_t m = 0; m < todo.merges.size(); m++) alone[todo.merges[m].first] = count_of(int(m)) == 1;
  engine.pool.run_within(int(todo.tasks.size()), [&](int index, int thread) {
    const Task& task = todo.tasks[index];
    Worker<E> worker(isa, a, batch, {engine.scratch<char>(thread), todo.rows, key_blocks, panels});
    size_t next = index + engine.pool.threads();  // the task this thread most likely takes after this one
    if (next < todo.tasks.size()) worker.fetch(todo.tasks[next], todo.tasks[next].first);
    if (!worker.sums(task))
      bad = true;
    else if (alone[index])
      worker.write(task);
    else
      worker.keep(task, partials);
  });
  if (bad) throw std::out_of_range("block_table_SB: a block id is not in 0 .. " + std::to_string(a.blocks - 1));
  if (!split) return;

  engine.pool.run(int(todo.merges.size()), [&](int index, int thread) {
    const Merge& merge = todo.merges[index];
    if (merge.count == 1) return;
    const Task& task = todo.tasks[merge.first];
    size_t width = columns + 2, step = size_t(task.tokens) * share * width;
    for (int r = 0; r < task.tokens * share; r++)
      merge_row(isa, partials + task.partial + r * width, step, merge.count, columns, engine.scratch<float>(thread),
                out_row(a, task, r));
  });
}

template void attend(Engine&, const Attention<bf16>&, const Batch&);
template void attend(Engine&, const Attention<float>&, const Batch&);
