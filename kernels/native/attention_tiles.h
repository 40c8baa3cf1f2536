// Attention over a cache of tiles: keys and values are multiplied where they lie, a window of 128 tokens after the
// other, all heads of a window before the next. Tiles are asked for about a window ahead in the order of their
// addresses: a core keeps up with memory along a stream, and reaches a third of that speed in pieces of 2 KiB. Three of
// every four are asked for during the products and one during the softmax, so that memory never pauses.
#pragma once
#include "attention_plan.h"

namespace {

constexpr int WINDOW = 128;                    // keys whose softmax is taken at once, counted from position 0
constexpr int TILES = WINDOW / TILE_TOKENS;

// Where the sixteen tokens of the first key that any row of a task sees begin.
inline int first_tile(const Task& task, int window) {
  return std::max(task.first, lowest_key(task.position, window)) / TILE_TOKENS * TILE_TOKENS;
}

// The tiles of a task in the order of their addresses, window by window, and then those of the task after it.
template <class E>
class TilesAhead {
 public:
  TilesAhead(const Attention<E>& a, const Batch& batch) : a_(a), batch_(batch) {}

  // Begins with a task unless it is under way already, then asks for about a window.
  void start(const Task& task, const Task* next) {
    if (task_ != &task) {
      go_to(&task);
      next_ = next;
      ask(2 * TILES * task.groups);
    }
    next_ = next;
  }

  // Asks for so many tiles at once.
  void ask(int tiles) {
    for (int i = 0; i < tiles; i++) {
      const char* tile = reinterpret_cast<const char*>(take());
      for (size_t at = 0; at < size_t(TILE_TOKENS) * a_.keys.size * sizeof(E); at += 64)
        __builtin_prefetch(tile + at, 0, 2);
    }
  }

  // The next of three tiles in every four places, and the last one again.
  const E* take(int place) { return place % 4 < 3 ? take() : tile_; }

  // The next tile; once there is none, the last.
  const E* take() {
    if (task_ && position_ >= task_->last) go_to(next_);
    if (!task_) return tile_;
    int block = *entry_;
    if (block < 0 || block >= a_.blocks) return tile_;
    const Cache<E>& cache = values_ ? a_.values : a_.keys;
    tile_ = cache.at(block, task_->group + group_, inside_);
    if (++group_ < task_->groups) return tile_;
    group_ = 0;
    if (values_) go_on();
    values_ = !values_;
    return tile_;
  }

 private:
  void go_to(const Task* task) {
    task_ = task;
    next_ = nullptr;
    group_ = 0;
    values_ = false;
    if (!task) return;
    position_ = first_tile(*task, a_.window);
    entry_ = batch_.table + task->sequence * batch_.table_stride + position_ / a_.block_size;
    inside_ = position_ % a_.block_size;
  }

  void go_on() {
    position_ += TILE_TOKENS;
    inside_ += TILE_TOKENS;
    if (inside_ < a_.block_size) return;
    inside_ = 0;
    entry_++;
  }

  const Attention<E>& a_;
  const Batch& batch_;
  const Task *task_ = nullptr, *next_ = nullptr;
  int position_ = 0, group_ = 0;
  const int32_t* entry_ = nullptr;  // of the block table at `position_`, which is token `inside_` of that block
  int inside_ = 0;
  bool values_ = false;
  const E* tile_ = a_.keys.data;
};

// One thread's working memory for tasks of up to `rows` query rows of each of `groups` key/value heads.
template <class E>
struct TilesSpace {
  int rows, groups, key_blocks, panels, columns;
  float *scores = nullptr, *sums = nullptr, *top = nullptr, *total = nullptr;
  E *queries = nullptr, *weights = nullptr, *edges = nullptr;

  size_t bytes() const {
    size_t all = size_t(rows) * groups;
    return sizeof(float) * (size_t(rows) * WINDOW + all * (PANEL * panels + 2)) +
           sizeof(E) * (size_t(rows) * WINDOW + all * key_blocks * BLOCK + size_t(2) * TILE_TOKENS * columns);
  }

  TilesSpace at(char* memory) const {
    TilesSpace s = *this;
    size_t all = size_t(rows) * groups;
    s.scores = reinterpret_cast<float*>(memory);
    s.sums = s.scores + size_t(rows) * WINDOW;
    s.edges = reinterpret_cast<E*>(s.sums + all * PANEL * panels);
    s.queries = s.edges + size_t(2) * TILE_TOKENS * columns;
    s.weights = s.queries + all * key_blocks * BLOCK;
    s.top = reinterpret_cast<float*>(s.weights + size_t(rows) * WINDOW);
    s.total = s.top + all;
    return s;
  }

  // The same with the parts of one head.
  TilesSpace of(int group) const {
    TilesSpace s = *this;
    s.sums += size_t(group) * rows * PANEL * panels;
    s.queries += size_t(group) * rows * key_blocks * BLOCK;
    s.top += group * rows;
    s.total += group * rows;
    return s;
  }
};

template <class E>
class TilesWorker {
 public:
  using Space = TilesSpace<E>;

  static Space space(const Attention<E>& a, int rows, int together) {
    return {rows, together, ceil_div(a.keys.size, BLOCK), ceil_div(a.values.size, PANEL), a.values.size};
  }

  TilesWorker(const Isa& isa, const Attention<E>& a, const Batch& batch, const Space& space)
      : isa_(isa), loops_(isa.of<E>()), a_(a), batch_(batch), all_(space), share_(a.heads / a.groups), ahead_(a, batch) {}

  // False when the block table names a block that does not exist. `next`: the task this thread most likely takes after
  // this one, or null. partials: where sums of one of several splits go; null for the only one, whose result is written.
  bool run(const Task& task, const Task* next, float* partials) {
    rows_ = task.tokens * share_;
    padded_ = whole_groups(rows_);
    low_ = std::max(task.first, lowest_key(task.position, a_.window));
    ahead_.start(task, next);
    for (int g = 0; g < task.groups; g++) begin(all_.of(g), task, task.group + g);
    for (int key = task.first / WINDOW * WINDOW; key < task.last; key += WINDOW) {
      if (key + WINDOW <= low_) continue;
      start_ = std::max(key, first_tile(task, a_.window));
      tiles_ = ceil_div(std::min(key + WINDOW, task.last) - start_, TILE_TOKENS);
      for (int g = 0; g < task.groups; g++) {
        s_ = all_.of(g);
        if (!point_at_tiles(task, task.group + g)) return false;
        score();
        for (int r = 0; r < rows_; r++) {
          ahead_.ask(r < tiles_ / 2);
          weigh(task, r);
        }
        ahead_.ask(std::max(tiles_ / 2 - rows_, 0));
        copy_edges(task);
        add_values();
      }
    }
    for (int g = 0; g < task.groups; g++) {
      if (partials)
        keep(all_.of(g), partials + task.partial + size_t(g) * rows_ * (a_.values.size + 2));
      else
        write(all_.of(g), task, g);
    }
    return true;
  }

 private:
  void begin(const Space& s, const Task& task, int group) {
    size_t wide = size_t(s.key_blocks) * BLOCK;
    for (int r = 0; r < rows_; r++) {
      size_t head = size_t(group) * share_ + r % share_;
      E* to = s.queries + r * wide;
      memcpy(to, a_.q + (task.token + r / share_) * a_.q_token + head * a_.q_head, a_.keys.size * sizeof(E));
      memset(to + a_.keys.size, 0, (wide - a_.keys.size) * sizeof(E));
    }
    std::fill(s.top, s.top + rows_, -INFINITY);
    std::fill(s.total, s.total + rows_, 0.0f);
    memset(s.sums, 0, size_t(padded_) * PANEL * s.panels * sizeof(float));
  }

  bool point_at_tiles(const Task& task, int group) {
    const int32_t* entry = batch_.table + task.sequence * batch_.table_stride + start_ / a_.block_size;
    int inside = start_ % a_.block_size;
    for (int t = 0; t < tiles_; t++) {
      int block = *entry;
      if (block < 0 || block >= a_.blocks) return false;
      key_[t] = a_.keys.at(block, group, inside);
      value_[t] = a_.values.at(block, group, inside);
      inside += TILE_TOKENS;
      if (inside < a_.block_size) continue;
      inside = 0;
      entry++;
    }
    return true;
  }

  // Four tiles at a time, their scores 64 to a row. Where fewer are left, the last stands in and is never read.
  void score() {
    for (int t = 0; t < tiles_; t += 4) {
      const E *tile[4], *next[4];
      for (int i = 0; i < 4; i++) {
        tile[i] = key_[std::min(t + i, tiles_ - 1)];
        next[i] = ahead_.take(t + i < tiles_ ? i : 3);
      }
      loops_.score_tiles(s_.queries, size_t(s_.key_blocks) * BLOCK, rows_, tile, next, a_.keys.size / lane_of<E>(),
                         s_.scores + size_t(t) / 4 * padded_ * PANEL);
    }
  }

  void weigh(const Task& task, int r) {
    int position = task.position + r / share_;
    int low = std::max(lowest_key(position, a_.window) - start_, 0);
    int high = std::clamp(position + 1 - start_, 0, std::min(task.last - start_, tiles_ * TILE_TOKENS));
    float kept = loops_.softmax_tiles(s_.scores + r * PANEL, size_t(padded_) * PANEL, a_.scale, low, high,
                                      tiles_ * TILE_TOKENS, s_.top + r, s_.total + r, s_.weights + size_t(r) * WINDOW);
    if (kept == 1.0f) return;
    for (int p = 0; p < s_.panels; p++) isa_.scale_row(s_.sums + (size_t(p) * padded_ + r) * PANEL, kept, PANEL);
  }

  // The first and the last tile may hold what no row sees.
  void copy_edges(const Task& task) {
    int ends[] = {0, tiles_ - 1};
    for (int i = 0; i < (tiles_ > 1 ? 2 : 1); i++) {
      int position = start_ + ends[i] * TILE_TOKENS;
      int first = std::max(low_ - position, 0), end = std::min(task.last - position, TILE_TOKENS);
      if (end - first == TILE_TOKENS) continue;
      E* copy = s_.edges + i * TILE_TOKENS * a_.values.size;
      copy_seen(value_[ends[i]], a_.values.size, first, end, copy);
      value_[ends[i]] = copy;
    }
  }

  void add_values() {
    for (int t = 0; t < tiles_; t++) next_[t] = ahead_.take(t);
    for (int p = 0; p < s_.panels; p++)
      loops_.add_values(s_.weights, WINDOW, rows_, value_, next_, tiles_, p * PANEL, a_.values.size,
                        s_.sums + size_t(p) * padded_ * PANEL);
  }

  void write(const Space& s, const Task& task, int group) {
    for (int p = 0; p < s.panels; p++) {
      float* sums = s.sums + size_t(p) * padded_ * PANEL;
      int columns = std::min(PANEL, a_.values.size - p * PANEL);
      for (int r = 0; r < rows_; r++) isa_.scale_row(sums + r * PANEL, 1.0f / s.total[r], PANEL);
      for (int n = 0; n < task.tokens; n++)
        loops_.store(sums + n * share_ * PANEL, share_, nullptr, out_row(a_, task, group, n * share_) + p * PANEL,
                     a_.values.size, columns);
    }
  }

  void keep(const Space& s, float* partials) const {
    int columns = a_.values.size;
    for (int r = 0; r < rows_; r++, partials += columns + 2) {
      partials[0] = s.top[r];
      partials[1] = s.total[r];
      for (int p = 0; p < s.panels; p++)
        memcpy(partials + 2 + p * PANEL, s.sums + (size_t(p) * padded_ + r) * PANEL,
               std::min(PANEL, columns - p * PANEL) * sizeof(float));
    }
  }

  const Isa& isa_;
  const Loops<E>& loops_;
  const Attention<E>& a_;
  const Batch& batch_;
  const Space all_;
  Space s_ = all_;  // of the head at hand
  const int share_;
  TilesAhead<E> ahead_;
  int rows_ = 0, padded_ = 0;
  int low_ = 0, start_ = 0, tiles_ = 0;  // first key any row sees; where this window's tiles begin, how many
  const E *key_[TILES], *value_[TILES], *next_[TILES];
};

}  // namespace
