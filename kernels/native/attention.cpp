#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "ahead.h"

namespace {

// Keys are taken 64 at a time and their sums merged every 512, both counted from position 0. A token's result is
// then a function of its own position and context, whoever computes it, alone, in a batch or in a prefill.
constexpr int CHUNK = 64;
constexpr int SPLIT = 512;
constexpr int MOST_ROWS = 64;  // query rows of one task, unless one token's group of heads is larger

struct Task {
  int sequence, group, groups;  // key/value heads group .. group + groups - 1
  int token, tokens;      // first query token, count
  int position;           // of the first query token
  int context;
  int first, last;        // keys
  size_t partial;         // offset of this task's sums in the shared partials
};

// A run of tasks over the same query rows, one per split; `group` counts from the tasks' first.
struct Merge {
  int first, count, group;
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
  return threads == 1 || pieces >= 2 * threads ? groups : 1;
}

Plan plan(const Batch& batch, int groups, int together, int share, int columns, int window) {
  Plan plan;
  int step = std::max(1, MOST_ROWS / share);
  for (int s = 0; s < batch.sequences; s++) {
    int begin = batch.query_start[s], end = batch.query_start[s + 1], context = batch.context[s];
    for (int t = begin; t < end; t += step) {
      int n = std::min(step, end - t), position = context - (end - t);
      int from = lowest_key(position, window) / SPLIT * SPLIT, to = position + n;
      plan.rows = std::max(plan.rows, whole_groups(n * share));
      for (int g = 0; g < groups; g += together) {
        for (int i = 0; i < together; i++)
          plan.merges.push_back({int(plan.tasks.size()), (to - from + SPLIT - 1) / SPLIT, i});
        for (int key = from; key < to; key += SPLIT) {
          int last = std::min(key + SPLIT, to);
          plan.tasks.push_back({s, g, together, t, n, position, context, key, last, plan.partials});
          plan.partials += size_t(together) * n * share * (columns + 2);
        }
      }
    }
  }
  return plan;
}

// One thread's working memory for tasks of up to `rows` query rows of each of `groups` key/value heads.
template <class E>
struct Workspace {
  int rows, key_blocks, panels, groups;
  E *keys = nullptr, *values = nullptr, *weights = nullptr, *zero = nullptr, *queries = nullptr, *packed = nullptr;
  float *scores = nullptr, *sums = nullptr, *top = nullptr, *total = nullptr;

  size_t bytes() const {
    size_t elements = size_t(1 + groups) * key_blocks * PANEL_BLOCK + 2 * PANEL_BLOCK + rows * PANEL +
                      size_t(1 + groups * rows) * key_blocks * BLOCK;
    return elements * sizeof(E) + sizeof(float) * (size_t(rows) * PANEL * (1 + groups * panels) + 2 * groups * rows);
  }

  Workspace at(char* memory) const {
    Workspace w = *this;
    w.keys = reinterpret_cast<E*>(memory);
    w.packed = w.keys + key_blocks * PANEL_BLOCK;
    w.values = w.packed + size_t(groups) * key_blocks * PANEL_BLOCK;
    w.weights = w.values + 2 * PANEL_BLOCK;
    w.zero = w.weights + rows * PANEL;
    w.queries = w.zero + key_blocks * BLOCK;
    w.scores = reinterpret_cast<float*>(w.queries + size_t(groups) * rows * key_blocks * BLOCK);
    w.sums = w.scores + rows * PANEL;
    w.top = w.sums + size_t(groups) * rows * PANEL * panels;
    w.total = w.top + groups * rows;
    return w;
  }

  // The same with the parts of one head.
  Workspace of(int group) const {
    Workspace w = *this;
    w.packed += size_t(group) * key_blocks * PANEL_BLOCK;
    w.queries += size_t(group) * rows * key_blocks * BLOCK;
    w.sums += size_t(group) * rows * PANEL * panels;
    w.top += group * rows;
    w.total += group * rows;
    return w;
  }
};

// Where row r of a task's result goes: rows are tokens, then the heads that share one key/value head.
template <class E>
E* out_row(const Attention<E>& a, const Task& task, int group, int r) {
  int share = a.heads / a.groups;
  size_t head = size_t(task.group + group) * share + r % share;
  return a.out + ((task.token + r / share) * size_t(a.heads) + head) * a.values.size;
}

template <class E>
class Worker {
 public:
  Worker(const Isa& isa, const Attention<E>& a, const Batch& batch, const Workspace<E>& all)
      : isa_(isa), loops_(isa.of<E>()), a_(a), batch_(batch), all_(all), w_(all), share_(a.heads / a.groups) {}

  // False when the block table names a block that does not exist. `next`: the task this thread most likely takes after
  // this one, or null.
  bool sums(const Task& task, const Task* next) {
    rows_ = task.tokens * share_;
    padded_ = whole_groups(rows_);
    memset(all_.weights, 0, size_t(padded_) * PANEL * sizeof(E));
    memset(all_.zero, 0, size_t(blocks_) * BLOCK * sizeof(E));
    direct_ = can_score_directly();
    for (int g = 0; g < task.groups; g++) begin(task, g);
    int lowest = lowest_key(task.position, a_.window);
    for (int key = task.first; key < task.last; key += CHUNK) {
      if (key + CHUNK <= lowest) continue;
      for (int g = 0; g < task.groups; g++) {
        ahead_.clear();
        if (key + CHUNK < task.last)
          plan_ahead(task, key + CHUNK, g);
        else if (next)
          plan_ahead(*next, next->first, g);
        w_ = all_.of(g);
        if (!point_at_keys(task, task.group + g, key, lowest)) return false;
        add_chunk(task, key);
      }
    }
    return true;
  }

  // The only split: normalise and round.
  void write(const Task& task) {
    for (int g = 0; g < task.groups; g++) write(task, g);
  }

  // One of several splits: keep top, total and sums of every row.
  void keep(const Task& task, float* partials) {
    size_t each = size_t(rows_) * (a_.values.size + 2);
    for (int g = 0; g < task.groups; g++) keep(all_.of(g), partials + task.partial + g * each);
  }

 private:
  void plan_ahead(const Task& task, int key, int group) {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    int high = std::min(key + CHUNK, task.last);
    for (int position = key; position < high;) {
      int offset = position % a_.block_size, block = table[position / a_.block_size];
      if (!exists(block)) return;
      int count = std::min(high - position, a_.block_size - offset);
      add_ahead(at(a_.keys, task.group + group, block, offset), count, a_.keys);
      if (a_.values.data != a_.keys.data) add_ahead(at(a_.values, task.group + group, block, offset), count, a_.values);
      position += count;
    }
  }

  void add_ahead(const E* row, int count, const Cache<E>& cache) {
    size_t bytes = cache.size * sizeof(E);
    if (cache.token_stride == size_t(cache.size)) return ahead_.add(row, count * bytes);
    for (; count > 0; count--, row += cache.token_stride) ahead_.add(row, bytes);
  }

  void begin(const Task& task, int group) {
    w_ = all_.of(group);
    take_queries(task, task.group + group);
    std::fill(w_.top, w_.top + rows_, -INFINITY);
    std::fill(w_.total, w_.total + rows_, 0.0f);
    memset(w_.sums, 0, size_t(padded_) * PANEL * panels_ * sizeof(float));
    if (direct_) pack_queries();
  }

  void write(const Task& task, int group) {
    const Workspace<E> w_ = all_.of(group);
    for (int r = 0; r < rows_; r++) {
      float factor = 1.0f / w_.total[r];
      for (int p = 0; p < panels_; p++) isa_.scale_row(w_.sums + (size_t(p) * padded_ + r) * PANEL, factor, PANEL);
    }
    for (int p = 0; p < panels_; p++) {
      int columns = std::min(PANEL, a_.values.size - p * PANEL);
      for (int n = 0; n < task.tokens; n++)
        loops_.store(w_.sums + (size_t(p) * padded_ + n * share_) * PANEL, share_, nullptr,
                     out_row(a_, task, group, n * share_) + p * PANEL, a_.values.size, columns);
    }
  }

  void keep(const Workspace<E>& w, float* partials) const {
    int columns = a_.values.size;
    for (int r = 0; r < rows_; r++) {
      float* row = partials + size_t(r) * (columns + 2);
      row[0] = w.top[r];
      row[1] = w.total[r];
      for (int p = 0; p < panels_; p++)
        memcpy(row + 2 + p * PANEL, w.sums + (size_t(p) * padded_ + r) * PANEL,
               std::min(PANEL, columns - p * PANEL) * sizeof(float));
    }
  }

  void take_queries(const Task& task, int group) {
    size_t wide = size_t(blocks_) * BLOCK;
    for (int r = 0; r < rows_; r++) {
      size_t head = size_t(group) * share_ + r % share_;
      E* to = w_.queries + r * wide;
      memcpy(to, a_.q + (task.token + r / share_) * a_.q_token + head * a_.q_head, a_.keys.size * sizeof(E));
      memset(to + a_.keys.size, 0, (wide - a_.keys.size) * sizeof(E));
    }
  }

  // Key and value rows of this chunk; null where no query row may look.
  bool point_at_keys(const Task& task, int group, int key, int lowest) {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    int low = std::max(key, lowest), high = std::min(std::min(task.context, task.last), key + CHUNK);
    bool whole = low == key && high == key + CHUNK;
    if (!whole) std::fill(key_row_, key_row_ + CHUNK, w_.zero);
    if (!whole) std::fill(value_row_, value_row_ + CHUNK, w_.zero);
    for (int position = low; position < high;) {
      int offset = position % a_.block_size, block = table[position / a_.block_size];
      if (!exists(block)) return false;
      int stop = std::min(high, position - offset + a_.block_size);
      const E* k = at(a_.keys, group, block, offset);
      const E* v = at(a_.values, group, block, offset);
      for (; position < stop; position++, k += a_.keys.token_stride, v += a_.values.token_stride) {
        key_row_[position - key] = k;
        value_row_[position - key] = v;
      }
    }
    if (direct_) point_at_tiles(task, group, key, low, high);
    return true;
  }

  // The four sixteens of this chunk's keys; where no row looks, one that some row does see.
  void point_at_tiles(const Task& task, int group, int key, int low, int high) {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    for (int t = 0; t < CHUNK / 16; t++) {
      int position = std::clamp(key + t * 16, low / 16 * 16, (high - 1) / 16 * 16);
      tile_[t] = at(a_.keys, group, table[position / a_.block_size], position % a_.block_size);
    }
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
    loops_.pack_keys(rows, ROW_GROUP, a_.keys.size, blocks_, w_.packed);
  }

  void score_chunk() {
    if (!direct_) {
      loops_.pack_keys(key_row_, CHUNK, a_.keys.size, blocks_, w_.keys);
      loops_.gemm(w_.queries, size_t(blocks_) * BLOCK, rows_, w_.keys, blocks_, w_.scores, false, {});
      return;
    }
    loops_.score(w_.packed, tile_, a_.keys.token_stride, blocks_, rows_, w_.scores);
  }

  void add_chunk(const Task& task, int key) {
    ahead_.take(32);
    score_chunk();
    for (int r = 0; r < rows_; r++) {
      ahead_.take(24);
      int position = task.position + r / share_;
      int low = std::clamp(lowest_key(position, a_.window) - key, 0, CHUNK);
      int high = std::clamp(position + 1 - key, 0, CHUNK);
      float kept = loops_.softmax(w_.scores + r * PANEL, a_.scale, low, high, w_.top + r, w_.total + r,
                                  w_.weights + r * PANEL);
      if (kept == 1.0f) continue;
      for (int p = 0; p < panels_; p++) isa_.scale_row(w_.sums + (size_t(p) * padded_ + r) * PANEL, kept, PANEL);
    }
    for (int p = 0; p < panels_; p++) {
      ahead_.take(64);
      loops_.pack_values(value_row_, p * PANEL, a_.values.size, w_.values);
      ahead_.take(64);
      loops_.gemm(w_.weights, PANEL, rows_, w_.values, 2, w_.sums + size_t(p) * padded_ * PANEL, true, {});
    }
  }

  const Isa& isa_;
  const Loops<E>& loops_;
  const Attention<E>& a_;
  const Batch& batch_;
  const Workspace<E> all_;
  Workspace<E> w_;  // of the head at hand
  const int share_, blocks_ = all_.key_blocks, panels_ = all_.panels;
  int rows_ = 0, padded_ = 0;
  bool direct_ = false;
  Ahead ahead_;
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
    isa.add_scaled(row, row, part + 2, factor[0], columns);
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
  int together = heads_together(batch, a.groups, engine.pool.threads());
  Plan todo = plan(batch, a.groups, together, share, columns, a.window);
  if (todo.tasks.empty()) return;
  Workspace<E> space{todo.rows, ceil_div(a.keys.size, BLOCK), ceil_div(columns, PANEL), together};
  engine.reserve(space.bytes());
  bool split = todo.tasks.size() * together != todo.merges.size();
  float* partials = split ? engine.shared[2].at_least<float>(todo.partials) : nullptr;
  std::atomic<bool> bad{false};

  auto count_of = [&](int m) { return todo.merges[m].count; };
  std::vector<bool> alone(todo.tasks.size());
  for (size_t m = 0; m < todo.merges.size(); m++) alone[todo.merges[m].first] = count_of(int(m)) == 1;
  engine.pool.run_within(int(todo.tasks.size()), [&](int index, int thread) {
    const Task& task = todo.tasks[index];
    Worker<E> worker(isa, a, batch, space.at(engine.scratch<char>(thread)));
    size_t next = size_t(index) + 1;
    if (!worker.sums(task, next < todo.tasks.size() ? &todo.tasks[next] : nullptr))
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
    size_t width = columns + 2, rows = size_t(task.tokens) * share;
    for (size_t r = 0; r < rows; r++)
      merge_row(isa, partials + task.partial + merge.group * rows * width + r * width, rows * task.groups * width,
                merge.count, columns, engine.scratch<float>(thread), out_row(a, task, merge.group, int(r)));
  });
}

template void attend(Engine&, const Attention<bf16>&, const Batch&);
template void attend(Engine&, const Attention<float>&, const Batch&);
