#include "indexer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "ahead.h"
#include "carver.h"

namespace {

constexpr int CHUNK = 64;       // keys that are scored at a time
constexpr int SPAN = 1024;      // keys of one task
constexpr int TASK_ROWS = 128;  // query rows of one task, unless a token has more heads
constexpr int DIRECT_ROWS = 64;  // up to so many query rows read keys where they lie; for more, panels of them pay
constexpr int AHEAD = 128;      // lines of the next keys that are asked for at a time
constexpr int SAMPLE = 1024;    // scores of a row that say where its best ones begin
constexpr size_t MOST_SCORES = size_t(1) << 23;  // kept at a time, 32 MiB

// Neighbouring tokens of a sequence, whose scores are rows of `stride`.
struct Tile {
  int sequence, token, tokens, position;
  size_t score, stride;

  int keys() const { return position + tokens; }  // that any of them sees
};

struct Span {
  int tile, first;
};

template <class E>
struct Space {
  E *queries, *panel, *zero;
  float* sums;

  static size_t bytes(int rows, int blocks) {
    size_t elements = size_t(whole_groups(rows)) * blocks * BLOCK + size_t(panels(rows)) * blocks * PANEL_BLOCK + size_t(blocks) * BLOCK;
    return elements * sizeof(E) + size_t(whole_groups(rows)) * PANEL * sizeof(float) + 4 * 64;
  }

  // Of 64 keys one, or, where keys are read as they lie, one of each sixteen queries: no fewer for more rows.
  static int panels(int rows) { return ceil_div(std::min(rows, DIRECT_ROWS), ROW_GROUP); }

  Space(char* memory, int rows, int blocks) {
    Carver carver(memory);
    queries = carver.take<E>(size_t(whole_groups(rows)) * blocks * BLOCK);
    panel = carver.take<E>(size_t(panels(rows)) * blocks * PANEL_BLOCK);
    zero = carver.take<E>(size_t(blocks) * BLOCK);
    sums = carver.take<float>(size_t(whole_groups(rows)) * PANEL);
  }
};

template <class E>
class Scorer {
 public:
  Scorer(const Isa& isa, const IndexQueries<E>& i, const Batch& batch)
      : isa_(isa), loops_(isa.of<E>()), i_(i), batch_(batch), blocks_(ceil_div(i.keys.size, BLOCK)),
        lies_(loops_.score && i.block_size % 16 == 0 && i.keys.size % BLOCK == 0) {}

  // Scores of a span of keys for a tile's tokens; of keys that one of them does not see, any. False: there is no such block.
  bool score(const Tile& tile, int first, char* memory, float* scores) const {
    int rows = tile.tokens * i_.heads, last = std::min(first + SPAN, tile.keys());
    Space<E> w(memory, rows, blocks_);
    memset(w.zero, 0, size_t(blocks_) * BLOCK * sizeof(E));
    take_queries(tile, rows, w);
    bool direct = lies_ && rows <= DIRECT_ROWS;
    if (direct) pack_queries(rows, w);
    Ahead ahead;
    for (int key = first; key < last; key += CHUNK) {
      int end = std::min(key + CHUNK, last);
      if (direct && end < last) plan_ahead(tile.sequence, end, std::min(end + CHUNK, last), ahead);
      ahead.take(AHEAD);
      if (!(direct ? score_as_they_lie(tile.sequence, key, end, rows, w) : score_packed(tile.sequence, key, end, rows, w)))
        return false;
      ahead.take(AHEAD);
      for (int n = 0; n < tile.tokens; n++)
        isa_.sum_heads(w.sums + size_t(n) * i_.heads * PANEL, i_.weight + size_t(tile.token + n) * i_.heads, i_.heads,
                       scores + tile.score + n * tile.stride + key);
    }
    return true;
  }

 private:
  void take_queries(const Tile& tile, int rows, const Space<E>& w) const {
    size_t wide = size_t(blocks_) * BLOCK, size = i_.keys.size;
    memset(w.queries + rows * wide, 0, (whole_groups(rows) - rows) * wide * sizeof(E));
    for (int r = 0; r < rows; r++) {
      E* to = w.queries + r * wide;
      memcpy(to, i_.q + (tile.token + r / i_.heads) * i_.q_token + r % i_.heads * i_.q_head, size * sizeof(E));
      memset(to + size, 0, (wide - size) * sizeof(E));
    }
  }

  void pack_queries(int rows, const Space<E>& w) const {
    for (int first = 0; first < rows; first += ROW_GROUP) {
      const E* row[ROW_GROUP];
      for (int r = 0; r < ROW_GROUP; r++) row[r] = w.queries + size_t(first + r) * blocks_ * BLOCK;
      loops_.pack_keys(row, ROW_GROUP, i_.keys.size, blocks_, w.panel + size_t(first / ROW_GROUP) * blocks_ * PANEL_BLOCK);
    }
  }

  bool score_packed(int sequence, int key, int last, int rows, const Space<E>& w) const {
    const E* row[CHUNK];
    if (!point_at_keys(sequence, key, last, w.zero, row)) return false;
    loops_.pack_keys(row, CHUNK, i_.keys.size, blocks_, w.panel);
    loops_.gemm(w.queries, size_t(blocks_) * BLOCK, rows, w.panel, blocks_, w.sums, false, {});
    return true;
  }

  // The same scores. Of sixteens past the last key the last one stands in.
  bool score_as_they_lie(int sequence, int key, int last, int rows, const Space<E>& w) const {
    const E* tile[CHUNK / 16];
    for (int t = 0; t < CHUNK / 16; t++)
      if (!(tile[t] = sixteen(sequence, std::min(key + t * 16, (last - 1) / 16 * 16)))) return false;
    for (int r = 0; r < rows; r += ROW_GROUP)
      loops_.score(w.panel + size_t(r / ROW_GROUP) * blocks_ * PANEL_BLOCK, tile, i_.keys.token_stride, blocks_,
                   std::min(rows - r, ROW_GROUP), w.sums + size_t(r) * PANEL);
    return true;
  }

  void plan_ahead(int sequence, int key, int last, Ahead& ahead) const {
    ahead.clear();
    for (; key < last; key += 16)
      if (const E* keys = sixteen(sequence, key)) ahead.add(keys, 16 * i_.keys.token_stride * sizeof(E));
  }

  // Where sixteen keys begin; null where there is no such block.
  const E* sixteen(int sequence, int position) const {
    int block = batch_.table[sequence * batch_.table_stride + position / i_.block_size];
    return block >= 0 && block < i_.blocks ? i_.keys.at(block, 0, position % i_.block_size) : nullptr;
  }

  bool point_at_keys(int sequence, int key, int last, const E* zero, const E** row) const {
    const int32_t* table = batch_.table + sequence * batch_.table_stride;
    for (int j = 0; j < CHUNK; j++) row[j] = zero;
    for (int position = key; position < last;) {
      int offset = position % i_.block_size, block = table[position / i_.block_size];
      if (block < 0 || block >= i_.blocks) return false;
      const E* at = i_.keys.at(block, 0, offset);
      for (int end = std::min(last, position - offset + i_.block_size); position < end; position++, at += i_.keys.token_stride)
        row[position - key] = at;
    }
    return true;
  }

  const Isa& isa_;
  const Loops<E>& loops_;
  const IndexQueries<E>& i_;
  const Batch& batch_;
  const int blocks_;
  const bool lies_;  // sixteen keys of a block are one tile where they lie
};

// Higher for a higher score, and highest for what is no number. Both zeros are equal.
uint32_t rank(float score) {
  if (score != score) return std::numeric_limits<uint32_t>::max();
  score += 0.0f;
  uint32_t bits;
  memcpy(&bits, &score, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A score that about `top` of them reach, and most likely no fewer; the lowest of all where a sample of them does not say.
float likely_least(const float* score, int count, int top, float* sample) {
  double share = double(SAMPLE) * top / count, reach = share + 3 * std::sqrt(share) + 1;
  if (count < 2 * SAMPLE || reach >= SAMPLE) return -std::numeric_limits<float>::infinity();
  for (int i = 0; i < SAMPLE; i++) {
    float one = score[int64_t(i) * count / SAMPLE];
    sample[i] = one == one ? one : std::numeric_limits<float>::infinity();
  }
  std::nth_element(sample, sample + int(reach), sample + SAMPLE, std::greater<float>());
  return sample[int(reach)];
}

// How many scores are not below `least`; their positions ascend.
int reaching(const float* score, int count, float least, int32_t* at) {
  int held = 0;
  for (int p = 0; p < count; p++) {
    at[held] = p;
    held += !(score[p] < least);  // what is no number is not below
  }
  return held;
}

// One thread's memory for the best of up to `count` scores.
struct Ranking {
  uint64_t *rank, *sorted;
  int32_t* at;

  static size_t bytes(int count) { return size_t(count) * (2 * sizeof(uint64_t) + sizeof(int32_t)) + 3 * 64; }

  Ranking(char* memory, int count) {
    Carver carver(memory);
    rank = carver.take<uint64_t>(count), sorted = carver.take<uint64_t>(count), at = carver.take<int32_t>(count);
  }
};

// The positions of the `top` best of more scores than that, in order.
template <class Take>
void best(const float* score, int count, int top, const Ranking& w, const Take& take) {
  float sample[SAMPLE];
  int held = reaching(score, count, likely_least(score, count, top, sample), w.at);
  if (held < top) held = reaching(score, count, -std::numeric_limits<float>::infinity(), w.at);
  for (int k = 0; k < held; k++) w.rank[k] = uint64_t(rank(score[w.at[k]])) << 32 | uint32_t(~w.at[k]);  // an earlier one is higher
  std::copy(w.rank, w.rank + held, w.sorted);
  std::nth_element(w.sorted, w.sorted + top - 1, w.sorted + held, std::greater<uint64_t>());
  uint64_t least = w.sorted[top - 1];
  for (int k = 0; k < held; k++)
    if (w.rank[k] >= least) take(w.at[k]);
}

// Writes the slots of positions as they come. `sound` says whether all their blocks were there.
struct Slots {
  const int32_t* table;
  int block_size, blocks;
  int32_t* out;
  bool sound = true;

  void add(int position) {
    int block = table[position / block_size];
    bool there = block >= 0 && block < blocks;
    *out++ = there ? block * block_size + position % block_size : 0;
    sound &= there;
  }
};

template <class E>
class Choice {
 public:
  Choice(Engine& engine, const IndexQueries<E>& i, const Batch& batch)
      : engine_(engine), i_(i), batch_(batch), scorer_(*engine.isa, i, batch) {}

  void run() {
    int step = std::max(1, TASK_ROWS / i_.heads);
    for (int s = 0; s < batch_.sequences; s++) {
      int begin = batch_.query_start[s], end = batch_.query_start[s + 1], before = batch_.context[s] - end;
      int all = std::clamp(i_.top - before, begin, end);  // these see no more than `top`
      for (int t = begin; t < all; t++) choose_all(s, t, before + t + 1);
      for (int t = all; t < end; t += step) add(s, t, std::min(step, end - t), before + t);
    }
    flush();
    if (bad_) throw std::out_of_range("block_table_SB: a block id is not in 0 .. " + std::to_string(i_.blocks - 1));
  }

 private:
  Slots slots(int sequence, int token) const {
    return {batch_.table + sequence * batch_.table_stride, i_.block_size, i_.blocks, i_.slot + size_t(token) * i_.most};
  }

  void choose_all(int sequence, int token, int count) {
    Slots to = slots(sequence, token);
    for (int p = 0; p < count; p++) to.add(p);
    if (!to.sound) bad_ = true;
  }

  void add(int sequence, int token, int tokens, int position) {
    size_t stride = size_t(ceil_div(position + tokens, CHUNK)) * CHUNK;
    if (scores_ && scores_ + tokens * stride > MOST_SCORES) flush();
    tiles_.push_back({sequence, token, tokens, position, scores_, stride});
    scores_ += tokens * stride;
  }

  // Scores all tiles that wait, and chooses by them.
  void flush() {
    if (tiles_.empty()) return;
    std::vector<Span> spans;
    std::vector<std::pair<int, int>> rows;  // tile, which of its tokens
    int most = 0, longest = 0;
    for (int tile = 0; tile < int(tiles_.size()); tile++) {
      const Tile& at = tiles_[tile];
      most = std::max(most, at.tokens * i_.heads);
      longest = std::max(longest, at.keys());
      for (int first = 0; first < at.keys(); first += SPAN) spans.push_back({tile, first});
      for (int n = 0; n < at.tokens; n++) rows.push_back({tile, n});
    }
    float* scores = engine_.shared[2].at_least<float>(scores_);
    engine_.reserve(std::max(Space<E>::bytes(most, ceil_div(i_.keys.size, BLOCK)), Ranking::bytes(longest)));
    engine_.pool.run_within(int(spans.size()), [&](int index, int thread) {
      const Span& span = spans[index];
      if (!scorer_.score(tiles_[span.tile], span.first, engine_.scratch<char>(thread), scores)) bad_ = true;
    });
    if (!bad_)
      engine_.pool.run(int(rows.size()), [&](int index, int thread) {
        const Tile& tile = tiles_[rows[index].first];
        int n = rows[index].second;
        Slots to = slots(tile.sequence, tile.token + n);
        int count = tile.position + n + 1;
        best(scores + tile.score + n * tile.stride, count, i_.top, Ranking(engine_.scratch<char>(thread), count),
             [&](int position) { to.add(position); });
      });
    tiles_.clear();
    scores_ = 0;
  }

  Engine& engine_;
  const IndexQueries<E>& i_;
  const Batch& batch_;
  const Scorer<E> scorer_;
  std::vector<Tile> tiles_;
  size_t scores_ = 0;
  std::atomic<bool> bad_{false};
};

constexpr int MOST_KEY = 4096;  // elements of an index key
constexpr float EPS = 1e-6f;

// In place: weight * (x - mean) / deviation + bias.
template <class E>
void layer_norm(const Loops<E>& loops, E* x, int size, const E* weight, const E* bias) {
  float wide[MOST_KEY], sum = 0, squares = 0;
  for (int i = 0; i < size; i++) sum += wide[i] = to_float(x[i]);
  float mean = sum / size;
  for (int i = 0; i < size; i++) squares += (wide[i] - mean) * (wide[i] - mean);
  float factor = 1.0f / std::sqrt(squares / size + EPS);
  for (int i = 0; i < size; i++) wide[i] = (wide[i] - mean) * factor * to_float(weight[i]) + to_float(bias[i]);
  for (int c = 0; c < size; c += PANEL) loops.store(wide + c, 1, nullptr, x + c, PANEL, std::min(PANEL, size - c));
}

}  // namespace

template <class E>
void index_rows(Engine& engine, const IndexerShape& shape, const IndexerWeights& weights, const IndexCall<E>& call,
                const Batch& batch) {
  const Loops<E>& loops = engine.isa->of<E>();
  int size = weights.keys->outputs(), heads = weights.weights->outputs(), turned = 2 * call.turn.half;
  if (size > MOST_KEY || turned > size)
    throw std::invalid_argument("index keys of " + std::to_string(size) + " elements, expected " + std::to_string(turned) +
                                " to " + std::to_string(MOST_KEY));
  check_slots(call.keys, call.kv_slot, call.tokens);
  auto turn = [&](E* head, size_t t) {
    E kept[MOST_KEY];
    size_t at = size_t(call.turn.position[t]) * call.turn.half;
    memcpy(kept, head, turned * sizeof(E));
    loops.rope(kept, call.turn.cos + at, call.turn.sin + at, call.turn.half, shape.interleaved, head);
  };
  weights.keys->run(engine, call.normed, call.hidden, call.tokens, call.key, size);
  by_rows(engine, call.tokens, [&](size_t t) {
    E* key = call.key + t * size;
    layer_norm(loops, key, size, static_cast<const E*>(weights.norm), static_cast<const E*>(weights.bias));
    turn(key, t);
    call.keys.put(call.kv_slot[t], 0, key);
  });
  if (!call.slot) return;
  weights.weights->run(engine, call.normed, call.hidden, call.tokens, call.weight, heads);
  weights.queries->run(engine, call.ranked, call.rank, call.tokens, call.query, size_t(heads) * size);
  float scale = float(1.0 / std::sqrt(double(heads) * size));
  by_rows(engine, call.tokens, [&](size_t t) {
    for (int h = 0; h < heads; h++) {
      turn(call.query + (t * heads + h) * size, t);
      call.weight[t * heads + h] *= scale;
    }
  });
  const Store<E>& c = call.keys;
  Cache<E> keys{c.data, c.block_stride, c.group_stride, c.token_stride, size, c.layout};
  choose_rows(engine, IndexQueries<E>{call.query, size_t(heads) * size, size_t(size), call.weight, heads, shape.top, keys,
                                      c.blocks, c.block_size, call.slot, call.most}, batch);
}

template void index_rows(Engine&, const IndexerShape&, const IndexerWeights&, const IndexCall<bf16>&, const Batch&);
template void index_rows(Engine&, const IndexerShape&, const IndexerWeights&, const IndexCall<float>&, const Batch&);

template <class E>
void choose_rows(Engine& engine, const IndexQueries<E>& queries, const Batch& batch) {
  if (queries.heads < 1 || queries.top < 1 || queries.keys.layout != Layout::rows)
    throw std::invalid_argument("choose_rows: " + std::to_string(queries.heads) + " heads, the " +
                                std::to_string(queries.top) + " best; expected 1 or more of each, and a cache of rows");
  if (int64_t(queries.blocks) * queries.block_size > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("index_NBI: more than 2^31 - 1 rows");
  for (int s = 0; s < batch.sequences; s++)
    if (std::min(batch.context[s], queries.top) > queries.most)
      throw std::invalid_argument("max_context: below the context of sequence " + std::to_string(s));
  Choice<E>(engine, queries, batch).run();
}

template void choose_rows(Engine&, const IndexQueries<bf16>&, const Batch&);
template void choose_rows(Engine&, const IndexQueries<float>&, const Batch&);
