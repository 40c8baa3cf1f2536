// Attention over a cache of rows, any sizes: MLA's latent rows, and GQA where blocks or heads are not whole tiles. Keys
// and values are packed 64 at a time on their way into products, and the softmax runs along.
#pragma once
#include <cmath>

#include "ahead.h"
#include "attention_plan.h"

namespace {

constexpr int CHUNK = 64;  // keys taken at a time, counted from position 0

// One thread's working memory for tasks of up to `rows` query rows of each of `groups` key/value heads.
template <class E>
struct RowsSpace {
  int rows, key_blocks, panels, groups;
  int wide;  // numbers of the chunk's keys and values, where they are made of 8 bits
  E *keys = nullptr, *values = nullptr, *weights = nullptr, *zero = nullptr, *queries = nullptr, *packed = nullptr, *widened = nullptr;
  float *scores = nullptr, *sums = nullptr, *top = nullptr, *total = nullptr;

  size_t bytes() const {
    size_t elements = size_t(1 + groups) * key_blocks * PANEL_BLOCK + 2 * PANEL_BLOCK + rows * PANEL +
                      size_t(1 + groups * rows) * key_blocks * BLOCK + wide;
    return elements * sizeof(E) + sizeof(float) * (size_t(rows) * PANEL * (1 + groups * panels) + 2 * groups * rows);
  }

  RowsSpace at(char* memory) const {
    RowsSpace w = *this;
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
    w.widened = reinterpret_cast<E*>(w.total + groups * rows);
    return w;
  }

  // The same with the parts of one head.
  RowsSpace of(int group) const {
    RowsSpace w = *this;
    w.packed += size_t(group) * key_blocks * PANEL_BLOCK;
    w.queries += size_t(group) * rows * key_blocks * BLOCK;
    w.sums += size_t(group) * rows * PANEL * panels;
    w.top += group * rows;
    w.total += group * rows;
    return w;
  }
};

template <class E>
class RowsWorker {
 public:
  using Space = RowsSpace<E>;

  static Space space(const Isa&, const Attention<E>& a, int rows, int together) {
    int wide = a.keys.bits == Bits::whole ? 0 : CHUNK * (a.keys.size + a.values.size);
    return {whole_groups(rows), ceil_div(a.keys.size, BLOCK), ceil_div(a.values.size, PANEL), together, wide};
  }

  RowsWorker(const Isa& isa, const Attention<E>& a, const Batch& batch, const RowsSpace<E>& all)
      : isa_(isa), loops_(isa.of<E>()), a_(a), batch_(batch), all_(all), w_(all), share_(a.heads / a.groups) {}

  // As TilesWorker::run.
  bool run(const Task& task, const Task* next, float* partials) {
    if (!sums(task, next)) return false;
    size_t each = Partial::floats(rows_, a_.values.size);
    for (int g = 0; g < task.groups; g++) {
      if (partials)
        keep(all_.of(g), partials + task.partial + g * each);
      else
        write(task, g);
    }
    return true;
  }

 private:
  bool sums(const Task& task, const Task* next) {
    rows_ = task.tokens * share_;
    padded_ = whole_groups(rows_);
    memset(all_.weights, 0, size_t(padded_) * PANEL * sizeof(E));
    memset(all_.zero, 0, size_t(blocks_) * BLOCK * sizeof(E));
    direct_ = can_score_directly();
    for (int g = 0; g < task.groups; g++) begin(task, g);
    int lowest = lowest_key(task.position, a_.window);
    started_ = false;
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
      started_ = true;
    }
    return true;
  }

  void plan_ahead(const Task& task, int key, int group) {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    int high = std::min(key + CHUNK, task.last);
    for (int position = key; position < high;) {
      int offset = position % a_.block_size, block = table[position / a_.block_size];
      if (!exists(block)) return;
      int count = std::min(high - position, a_.block_size - offset);
      add_ahead(a_.keys.at(block, task.group + group, offset), count, a_.keys);
      if (a_.values.data != a_.keys.data) add_ahead(a_.values.at(block, task.group + group, offset), count, a_.values);
      position += count;
    }
  }

  void add_ahead(const E* row, int count, const Cache<E>& cache) {
    size_t bytes = cache.bits == Bits::whole ? cache.size * sizeof(E) : cache.token_stride;
    if (cache.past(row, cache.token_stride) == reinterpret_cast<const E*>(reinterpret_cast<const char*>(row) + bytes))
      return ahead_.add(row, count * bytes);
    for (; count > 0; count--, row += cache.token_stride) ahead_.add(row, bytes);
  }

  void begin(const Task& task, int group) {
    w_ = all_.of(group);
    take_queries(task, task.group + group);
    std::fill(w_.top, w_.top + rows_, -INFINITY);
    std::fill(w_.total, w_.total + rows_, 0.0f);
    if (direct_) pack_queries();
  }

  void write(const Task& task, int group) {
    const RowsSpace<E> w_ = all_.of(group);
    for (int r = 0; r < rows_; r++) {
      float factor = 1.0f / a_.with_sink(w_.total[r], head_of(a_, task, group, r), w_.top[r]);
      for (int p = 0; p < panels_; p++) isa_.scale_row(w_.sums + (size_t(p) * padded_ + r) * PANEL, factor, PANEL);
    }
    for (int p = 0; p < panels_; p++) {
      int columns = std::min(PANEL, a_.values.size - p * PANEL);
      for (int n = 0; n < task.tokens; n++)
        loops_.store(w_.sums + (size_t(p) * padded_ + n * share_) * PANEL, share_, nullptr,
                     out_row(a_, task, group, n * share_) + p * PANEL, a_.values.size, columns);
    }
  }

  void keep(const RowsSpace<E>& w, float* partial) const {
    const Partial kept{partial, rows_, a_.values.size};
    for (int r = 0; r < rows_; r++) {
      kept.top(r) = w.top[r];
      kept.total(r) = w.total[r];
      for (int p = 0; p < panels_; p++)
        memcpy(kept.sums(r) + p * PANEL, w.sums + (size_t(p) * padded_ + r) * PANEL,
               std::min(PANEL, kept.columns - p * PANEL) * sizeof(float));
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
    seen_ = high - key;
    if (!whole) std::fill(key_row_, key_row_ + CHUNK, w_.zero);
    if (!whole) std::fill(value_row_, value_row_ + CHUNK, w_.zero);
    for (int position = low; position < high;) {
      int offset = position % a_.block_size, block = table[position / a_.block_size];
      if (!exists(block)) return false;
      int stop = std::min(high, position - offset + a_.block_size);
      const E* k = a_.keys.at(block, group, offset);
      const E* v = a_.values.at(block, group, offset);
      for (; position < stop; position++) {
        key_row_[position - key] = k;
        value_row_[position - key] = v;
        if (a_.keys.bits != Bits::whole) widen(position - key);
        k = a_.keys.past(k, a_.keys.token_stride), v = a_.values.past(v, a_.values.token_stride);
      }
    }
    if (direct_) point_at_tiles(task, group, key, low, high);
    return true;
  }

  // A row of 8 bits as numbers: its key, and its value, which is a part of that where latents are both.
  void widen(int token) {
    const int size = a_.keys.size, values = a_.values.size;
    const bool latent = a_.keys.data == a_.values.data;
    const E *key = key_row_[token], *value = value_row_[token];
    const Scales scale = Scales::of(key, size);
    E* to = w_.widened + size_t(token) * (size + values);
    const int first = latent ? values : size;
    loops_.widen_row(key, first, a_.keys.bits, scale.first, to);
    if (latent)
      loops_.widen_row(reinterpret_cast<const char*>(key) + first, size - first, a_.keys.bits, scale.second, to + first);
    else
      loops_.widen_row(value, values, a_.keys.bits, scale.second, to + size);
    key_row_[token] = to;
    value_row_[token] = latent ? to : to + size;
  }

  // The four sixteens of this chunk's keys; where no row looks, one that some row does see.
  void point_at_tiles(const Task& task, int group, int key, int low, int high) {
    const int32_t* table = batch_.table + task.sequence * batch_.table_stride;
    for (int t = 0; t < CHUNK / 16; t++) {
      int position = std::clamp(key + t * 16, low / 16 * 16, (high - 1) / 16 * 16);
      tile_[t] = a_.keys.at(table[position / a_.block_size], group, position % a_.block_size);
    }
  }

  bool exists(int block) const { return block >= 0 && block < a_.blocks; }

  // Sixteen keys of a block are one tile where they lie, unless the processor has no tiles.
  bool can_score_directly() const {
    return loops_.score && a_.keys.bits == Bits::whole && rows_ <= ROW_GROUP && a_.block_size % 16 == 0 && a_.keys.size % BLOCK == 0;
  }

  void pack_queries() {
    const E* rows[ROW_GROUP];
    for (int r = 0; r < ROW_GROUP; r++) rows[r] = r < rows_ ? w_.queries + size_t(r) * blocks_ * BLOCK : w_.zero;
    loops_.pack_keys(rows, ROW_GROUP, a_.keys.size, blocks_, w_.packed);
  }

  void score_chunk() {
    if (!direct_) {
      loops_.pack_keys(key_row_, seen_, a_.keys.size, blocks_, w_.keys);
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
      if (kept == 1.0f || !started_) continue;
      for (int p = 0; p < panels_; p++) isa_.scale_row(w_.sums + (size_t(p) * padded_ + r) * PANEL, kept, PANEL);
    }
    for (int p = 0; p < panels_; p++) {
      ahead_.take(64);
      loops_.pack_values(value_row_, p * PANEL, a_.values.size, w_.values);
      ahead_.take(64);
      loops_.gemm(w_.weights, PANEL, rows_, w_.values, ceil_div(seen_, BLOCK), w_.sums + size_t(p) * padded_ * PANEL, started_, {});
    }
  }

  const Isa& isa_;
  const Loops<E>& loops_;
  const Attention<E>& a_;
  const Batch& batch_;
  const RowsSpace<E> all_;
  RowsSpace<E> w_;  // of the head at hand
  const int share_, blocks_ = all_.key_blocks, panels_ = all_.panels;
  int rows_ = 0, padded_ = 0, seen_ = 0;  // seen: keys of a chunk up to the last that some row sees
  bool direct_ = false, started_ = false;
  Ahead ahead_;
  const E *key_row_[CHUNK], *value_row_[CHUNK], *tile_[CHUNK / 16] = {};
};

}  // namespace
