// Attention over a cache of tiles: keys and values are multiplied where they lie, a window of tokens after the other.
// A window is one tile of every head, so that all is read in the order of its addresses, or eight tiles of one head after
// the other, which may become panels. Many query rows take eight tiles of one head also where a window is one. Tiles are
// asked for a window ahead in the order of their addresses: a core keeps up with memory along a stream, and reaches a third
// of that speed in pieces of 2 KiB.
#pragma once
#include "attention_cursor.h"

namespace {

constexpr int MOST_TILES = 8;  // of a window
constexpr size_t NEAR_BYTES = 16 << 10;  // of tiles that were made of 8 bits: half of the nearest cache
constexpr float SLACK = 8;     // natural: the sums so far are scaled when a weight would exceed e^8

// Whether a window is better one tile than eight: what all heads need for a tile has to stay in the nearest cache while
// keys and values pass through it, and the rows of a head should read a tile once.
template <class E>
bool one_tile_pays(const Attention<E>& a) {
  size_t query = a.keys.size * sizeof(E), sums = (a.values.size + 16) * sizeof(float);
  size_t row = query + sums + TILE_TOKENS * (sizeof(float) + sizeof(E));
  return a.heads * row <= 12 << 10 && a.heads / a.groups <= 6;
}

// One thread's working memory for tasks of up to `rows` query rows of each of `groups` key/value heads.
template <class E>
struct TilesSpace {
  int rows, groups, key_blocks, panels, columns;
  int window;  // keys taken at a time
  int rise;    // keys of a window, each of which may raise a row's top once
  int wide;    // numbers of a window's tiles, where they are made of 8 bits
  float *scores = nullptr, *sums = nullptr, *top = nullptr, *total = nullptr, *query_scale = nullptr;
  E *queries = nullptr, *weights = nullptr, *edges = nullptr, *widened = nullptr;

  size_t bytes() const {
    size_t all = size_t(rows) * groups;
    return sizeof(float) * all * (window + PANEL * panels + 16 + 2) +
           sizeof(E) * (all * (window + key_blocks * BLOCK) + size_t(2) * TILE_TOKENS * columns + wide);
  }

  TilesSpace at(char* memory) const {
    TilesSpace s = *this;
    size_t all = size_t(rows) * groups;
    s.scores = reinterpret_cast<float*>(memory);
    s.sums = s.scores + all * window;
    s.total = s.sums + all * PANEL * panels;
    s.edges = reinterpret_cast<E*>(s.total + all * 16);
    s.queries = s.edges + size_t(2) * TILE_TOKENS * columns;
    s.weights = s.queries + all * key_blocks * BLOCK;
    s.widened = s.weights + all * window;
    s.top = reinterpret_cast<float*>(s.widened + wide);
    s.query_scale = s.top + all;
    return s;
  }

  // The same with the parts of one head.
  TilesSpace of(int group) const {
    TilesSpace s = *this;
    size_t before = size_t(group) * rows;
    s.scores += before * window;
    s.sums += before * PANEL * panels;
    s.total += before * 16;
    s.queries += before * key_blocks * BLOCK;
    s.weights += before * window;
    s.top += before;
    s.query_scale += before;
    return s;
  }
};

template <class E>
class TilesWorker {
 public:
  using Space = TilesSpace<E>;

  static Space space(const Isa& isa, const Attention<E>& a, int rows, int together) {
    bool in_place = isa.of<E>().in_place;
    if (!in_place) rows = whole_groups(rows);  // as panels' products take them
    bool eight = a.keys.bits != Bits::whole && !takes_codes(isa, a);
    bool far = eight && size_t(MOST_TILES) * TILE_TOKENS * a.keys.size * sizeof(E) > NEAR_BYTES;
    int most = far ? PANEL : MOST_TILES * TILE_TOKENS;
    int rise = in_place && one_tile_pays(a) && !takes_codes(isa, a) ? TILE_TOKENS : most;
    int window = rows > a.heads / a.groups ? most : rise;
    int wide = eight ? window * std::max(a.keys.size, a.values.size) : 0;
    return {rows, together, ceil_div(a.keys.size, BLOCK), ceil_div(a.values.size, PANEL), a.values.size, window, rise, wide};
  }

  // Whether codes are multiplied where they lie, and no tiles are made of them.
  static bool takes_codes(const Isa& isa, const Attention<E>& a) {
    return sizeof(E) == sizeof(bf16) && a.keys.bits == Bits::int8 && isa.score_codes && a.keys.size <= MOST_CODES &&
           a.keys.size % isa.code_block == 0 && a.values.size % isa.code_block == 0;
  }

  TilesWorker(const Isa& isa, const Attention<E>& a, const Batch& batch, const Space& space)
      : isa_(isa), loops_(isa.of<E>()), a_(a), batch_(batch), share_(a.heads / a.groups),
        window_(space.window), rise_(space.rise), eight_(a.keys.bits != Bits::whole), codes_(takes_codes(isa, a)), one_by_one_(window_ == TILE_TOKENS), here_(a, batch), ahead_(a, batch) {
    heads_.reserve(space.groups);
    scales_.resize(eight_ ? size_t(2) * space.groups * window_ : 0);
    for (int g = 0; g < space.groups; g++) {
      Space s = space.of(g);
      heads_.push_back({s, {s.scores, size_t(std::min(s.window, PANEL)), 0, 0, 0, 0, a.scale, SLACK / a.scale, nullptr, nullptr,
                            s.top, s.total, s.weights, s.window, s.sums, 0, s.panels}});
    }
  }

  // False when the block table names a block that does not exist. `next`: the task this thread most likely takes after
  // this one, or null. partials: where sums of one of several splits go; null for the only one, whose result is written.
  bool run(const Task& task, const Task* next, float* partials) {
    rows_ = task.tokens * share_;
    padded_ = loops_.in_place ? rows_ : whole_groups(rows_);
    by_words_ = loops_.in_place && (one_by_one_ || rows_ <= isa_.word_rows);
    lowest_ = std::max(task.first, lowest_key(task.position, a_.window));
    start(task, next);
    for (int g = 0; g < task.groups; g++) begin(heads_[g], task, task.group + g);
    last_ = &task;
    int heads = one_by_one_ ? task.groups : 1;
    for (int key = task.first / window_ * window_; key < task.last; key += window_) {
      if (key + window_ <= lowest_) continue;
      start_ = std::max(key, first_tile(task, a_.window));
      tiles_ = ceil_div(std::min(key + window_, task.last) - start_, TILE_TOKENS);
      whole_ = see_all(task);
      if (!take_tiles()) return false;
      for (int g = 0; g < task.groups; g += heads) {
        for (int i = g; i < g + heads; i++) score(heads_[i].space, task, i);
        for (int i = g; i < g + heads; i++) weigh(heads_[i].softmax);
        for (int i = g; i < g + heads; i++) add_values(heads_[i], task, i);
      }
    }
    for (int g = 0; g < task.groups; g++) {
      if (partials)
        keep(heads_[g].space, partials + task.partial + g * Partial::floats(rows_, a_.values.size));
      else
        write(heads_[g].space, task, g);
    }
    return true;
  }

 private:
  struct Head {
    Space space;
    TilesSoftmax<E> softmax;
  };

  void begin(Head& head, const Task& task, int group) {
    const Space& s = head.space;
    head.softmax.step = head.softmax.sum_step = size_t(padded_) * PANEL;
    if (!same_rows(task)) take_queries(s, task, group);
    std::fill(s.top, s.top + rows_, -INFINITY);
    std::fill(s.total, s.total + rows_ * 16, 0.0f);
    memset(s.sums, 0, size_t(padded_) * PANEL * s.panels * sizeof(float));
  }

  // Whether the task before had these rows, with other keys.
  bool same_rows(const Task& task) const {
    const Task* last = last_;
    return last && last->token == task.token && last->tokens == task.tokens && last->group == task.group;
  }

  void take_queries(const Space& s, const Task& task, int group) {
    size_t wide = size_t(s.key_blocks) * BLOCK;
    for (int r = 0; r < rows_; r++) {
      const E* q = a_.q + (task.token + r / share_) * a_.q_token + (size_t(group) * share_ + r % share_) * a_.q_head;
      if (codes_) {
        take_codes(s, q, r);
        continue;
      }
      if (by_words_) {
        const int words = a_.keys.size / lane_of<E>(), step = rows_;
        const char* from = reinterpret_cast<const char*>(q);
        char* to = reinterpret_cast<char*>(s.queries) + 4 * r;
        for (int w = 0; w < words; w++, from += 4, to += 4 * step) memcpy(to, from, 4);
        continue;
      }
      E* to = s.queries + r * wide;
      memcpy(to, q, a_.keys.size * sizeof(E));
      memset(to + a_.keys.size, 0, (wide - a_.keys.size) * sizeof(E));
    }
  }

  CodeQueries code_queries(const Space& s) const { return {reinterpret_cast<int32_t*>(s.queries), s.query_scale, rows_}; }

  void take_codes(const Space& s, const E* q, int row) const {
    if constexpr (sizeof(E) == sizeof(bf16)) isa_.to_codes(q, a_.keys.size, row, code_queries(s));
  }

  // Whether every row sees every key of the window; which each does, where not.
  bool see_all(const Task& task) {
    int keys = tiles_ * TILE_TOKENS, end = start_ + keys, last = task.position + task.tokens - 1;
    if (end <= std::min(task.position + 1, task.last) && start_ >= lowest_key(last, a_.window)) return true;
    low_.resize(rows_), high_.resize(rows_);
    for (int r = 0; r < rows_; r++) {
      int position = task.position + r / share_;
      low_[r] = std::max(lowest_key(position, a_.window) - start_, 0);
      high_[r] = std::clamp(position + 1 - start_, 0, std::min(task.last - start_, keys));
    }
    return false;
  }

  // Begins with a task; asks for its first tiles unless they were asked for during the one before.
  void start(const Task& task, const Task* next) {
    here_.go_to(&task);
    bool under_way = ahead_.task() == &task;
    if (!under_way) ahead_.go_to(&task);
    ahead_.follow_with(next);
    if (!under_way) ask(2 * task.groups * window_ / TILE_TOKENS);
  }

  void ask(int tiles) {
    for (int i = 0; i < tiles; i++) {
      const char* tile = reinterpret_cast<const char*>(ahead_.take(true));
      if (tile) fetch(tile);
    }
  }

  void fetch(const char* tile) const {
    size_t row = eight_ ? a_.keys.token_stride : a_.keys.size * sizeof(E);
    for (size_t at = 0; at < TILE_TOKENS * row; at += 64) __builtin_prefetch(tile + at, 0, 2);
  }

  bool take_tiles() {
    for (int t = 0; t < tiles_; t++) {
      if (!here_.keys()) return false;
      key_[t] = here_.keys(), value_[t] = here_.values();
      here_.step();
    }
    return true;
  }

  // Points at the tiles of a head, so far behind those of the task's first, and at what to ask for meanwhile: all that
  // follows or nothing, or three tiles of every four.
  void point_at(const Cache<E>& cache, const E* const* tile, int group) {
    for (int t = 0; t < tiles_; t++) {
      tile_[t] = cache.past(tile[t], group * cache.group_stride);
      if (codes_) {
        if (!a_.latent() || &cache == &a_.keys) ask_for(t);
      } else if (eight_) {
        widen(cache, t);
      } else if (one_by_one_) {
        next_[t] = ahead_.take(false);
      } else {
        const E* next = t % 4 < 3 ? ahead_.take(true) : nullptr;
        next_[t] = next ? next : tile_[t];
      }
    }
  }

  // Rows that will be read next, while those of tile t are.
  void ask_for(int t) {
    const E* next = one_by_one_ ? ahead_.take(false) : t % 4 < 3 ? ahead_.take(true) : nullptr;
    if (next) fetch(reinterpret_cast<const char*>(next));
  }

  // Sixteen rows of 8 bits as a tile of the codes' numbers; their scales come to scores and weights.
  void widen(const Cache<E>& cache, int t) {
    ask_for(t);
    E* to = heads_.front().space.widened + size_t(t) * TILE_TOKENS * cache.size;
    (&cache == &a_.keys ? loops_.widen_keys : loops_.widen_values)(tile_[t], cache.token_stride, cache.size, cache.bits, to);
    tile_[t] = to;
    next_[t] = one_by_one_ ? nullptr : to;
  }

  // Of a head's keys, and behind those of its values, in this window.
  float* scales_of(int group) { return scales_.data() + size_t(2) * group * window_; }

  // 0 for what no row sees.
  void take_scales(const Task& task, int group) {
    float *keys = scales_of(group), *values = keys + window_;
    for (int t = 0; t < tiles_; t++, keys += TILE_TOKENS, values += TILE_TOKENS) {
      const char* row = reinterpret_cast<const char*>(a_.keys.past(key_[t], group * a_.keys.group_stride));
      int position = start_ + t * TILE_TOKENS;
      loops_.take_scales(row + a_.keys.size, a_.keys.token_stride, lowest_ - position, task.last - position, keys, values);
    }
  }

  void scale_scores(const Space& s, const float* scale) const {
    const int wide = std::min(window_, PANEL), keys = tiles_ * TILE_TOKENS;
    for (int k = 0; k < keys; k += PANEL)
      for (int r = 0; r < rows_; r++)
        isa_.f.scale_each(s.scores + size_t(k) * padded_ + r * wide, scale + k, std::min(keys - k, PANEL));
  }

  void scale_weights(const Space& s, const float* scale, int first, int keys) const {
    for (int r = 0; r < rows_; r++) loops_.scale_each(s.weights + size_t(r) * s.window + first, scale + first, keys);
  }

  void score(const Space& s, const Task& task, int group) {
    point_at(a_.keys, key_, group);
    if (codes_) {
      take_scales(task, group);
      return score_codes(s, scales_of(group));
    }
    size_t stride = by_words_ ? rows_ * lane_of<E>() : s.key_blocks * BLOCK;
    loops_.score_tiles(s.queries, stride, rows_, tile_, next_, tiles_, a_.keys.size / lane_of<E>(), s.scores,
                       std::min(window_, PANEL), size_t(padded_) * PANEL);
    if (!eight_) return;
    take_scales(task, group);
    scale_scores(s, scales_of(group));
  }

  // The second of a token's scales is that of its value, or of what a latent has behind it.
  void score_codes(const Space& s, const float* scale) {
    const CodeScales each{a_.latent() ? a_.values.size : a_.keys.size, scale, scale + window_};
    isa_.score_codes(code_queries(s), codes(0), tiles_, a_.keys.token_stride, a_.keys.size, each, s.scores, std::min(window_, PANEL),
                     size_t(padded_) * PANEL);
  }

  // The rows of tiles `first` and so on.
  const uint8_t* const* codes(int first) const { return reinterpret_cast<const uint8_t* const*>(tile_ + first); }

  // Scores become weights; but from the first row on whose top would rise later in the window, only the first ones.
  void weigh(TilesSoftmax<E>& softmax) {
    softmax.from = 0;
    softmax.keys = tiles_ * TILE_TOKENS;
    softmax.rise = std::min(rise_, softmax.keys);
    softmax.low = whole_ ? nullptr : low_.data();
    softmax.high = whole_ ? nullptr : high_.data();
    if (one_by_one_) return loops_.softmax_tiles(softmax, 0, rows_);
    weighed_ = 0;
    for (; weighed_ < rows_ && loops_.softmax_at_once(softmax, weighed_); weighed_++) ask(weighed_ < tiles_ / 2);
    if (weighed_ < rows_) {
      softmax.keys = softmax.rise;
      loops_.softmax_tiles(softmax, weighed_, rows_ - weighed_);
    }
    ask(std::max(tiles_ / 2 - weighed_, 0));  // and the fourth of every four tiles
  }

  // And those that are no weights yet become some, as many at a time as may raise a row's top.
  void add_values(Head& head, const Task& task, int group) {
    const Space& s = head.space;
    TilesSoftmax<E>& softmax = head.softmax;
    point_at(a_.values, value_, group);
    if (!whole_ && !codes_) copy_edges(s, task);
    if (!loops_.in_place && tiles_ % 2) clear_rest(s);
    add_tiles(s, group, 0, softmax.keys / TILE_TOKENS);
    while (softmax.keys < tiles_ * TILE_TOKENS) {
      softmax.from = softmax.keys;
      softmax.keys += softmax.rise;
      loops_.softmax_tiles(softmax, weighed_, rows_ - weighed_);
      add_tiles(s, group, softmax.from / TILE_TOKENS, softmax.rise / TILE_TOKENS);
    }
  }

  void add_tiles(const Space& s, int group, int first, int tiles) {
    if (codes_) return add_codes(s, scales_of(group) + (a_.latent() ? 0 : window_), first, tiles);
    if (eight_) scale_weights(s, scales_of(group) + window_, first * TILE_TOKENS, tiles * TILE_TOKENS);
    for (int p = 0; p < s.panels; p++)
      loops_.add_values(s.weights + first * TILE_TOKENS, s.window, rows_, tile_ + first, next_ + first, tiles, p * PANEL,
                        a_.values.size, s.sums + size_t(p) * padded_ * PANEL);
  }

  void add_codes(const Space& s, const float* scale, int first, int tiles) const {
    if constexpr (sizeof(E) == sizeof(bf16))
      isa_.add_codes(s.weights + first * TILE_TOKENS, s.window, rows_, codes(first), tiles, a_.values.token_stride, a_.values.size,
                     scale + first * TILE_TOKENS, s.sums, size_t(padded_) * PANEL);
  }

  // Panels take two tiles at a time. What an earlier window left beside the last one's weights may be no number.
  void clear_rest(const Space& s) {
    for (int r = 0; r < rows_; r++) memset(s.weights + size_t(r) * s.window + tiles_ * TILE_TOKENS, 0, TILE_TOKENS * sizeof(E));
  }

  // The first and the last tile may hold what no row sees.
  void copy_edges(const Space& s, const Task& task) {
    int ends[] = {0, tiles_ - 1};
    for (int i = 0; i < (tiles_ > 1 ? 2 : 1); i++) {
      int position = start_ + ends[i] * TILE_TOKENS;
      int first = std::max(lowest_ - position, 0), end = std::min(task.last - position, TILE_TOKENS);
      if (end - first == TILE_TOKENS) continue;
      E* copy = s.edges + i * TILE_TOKENS * a_.values.size;
      copy_seen(tile_[ends[i]], a_.values.size, first, end, copy);
      tile_[ends[i]] = copy;
    }
  }

  float total(const Space& s, int r) const {
    float all = 0;
    for (int i = 0; i < 16; i++) all += s.total[r * 16 + i];
    return all;
  }

  void write(const Space& s, const Task& task, int group) {
    for (int p = 0; p < s.panels; p++) {
      float* sums = s.sums + size_t(p) * padded_ * PANEL;
      int columns = std::min(PANEL, a_.values.size - p * PANEL);
      for (int r = 0; r < rows_; r++) {
        float all = a_.with_sink(total(s, r), head_of(a_, task, group, r), s.top[r] * a_.scale);
        isa_.scale_row(sums + r * PANEL, 1.0f / all, PANEL);
      }
      for (int n = 0; n < task.tokens; n++)
        loops_.store(sums + n * share_ * PANEL, share_, nullptr, out_row(a_, task, group, n * share_) + p * PANEL,
                     a_.values.size, columns);
    }
  }

  void keep(const Space& s, float* partial) const {
    const Partial kept{partial, rows_, a_.values.size};
    for (int r = 0; r < rows_; r++) {
      kept.top(r) = s.top[r] * a_.scale;
      kept.total(r) = total(s, r);
      for (int p = 0; p < s.panels; p++)
        memcpy(kept.sums(r) + p * PANEL, s.sums + (size_t(p) * padded_ + r) * PANEL,
               std::min(PANEL, kept.columns - p * PANEL) * sizeof(float));
    }
  }

  const Isa& isa_;
  const Loops<E>& loops_;
  const Attention<E>& a_;
  const Batch& batch_;
  const int share_;
  const int window_, rise_;
  const bool eight_;       // rows of 8 bits,
  const bool codes_;       // multiplied as they lie; else tiles are made of them
  const bool one_by_one_;  // a window is a tile
  std::vector<Head> heads_;
  Cursor<E> here_, ahead_;
  const Task* last_ = nullptr;  // whose queries are at hand
  int rows_ = 0, padded_ = 0;
  bool by_words_ = false;                   // queries' words lie in turn
  int lowest_ = 0, start_ = 0, tiles_ = 0;  // first key any row sees; where this window's tiles begin, how many
  int weighed_ = 0;                         // rows whose weights of this window were made at once
  bool whole_ = false;                      // every row sees all of this window
  std::vector<int> low_, high_;             // else what it sees, counted from the window's first key
  const E *key_[MOST_TILES], *value_[MOST_TILES];  // of the first head
  const E *tile_[MOST_TILES], *next_[MOST_TILES];  // of the head at hand
  std::vector<float> scales_;                      // of 8 bits
};

}  // namespace
