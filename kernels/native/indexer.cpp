#include "indexer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "carver.h"

namespace {

constexpr int CHUNK = 64;       // keys that are scored at a time
constexpr int SPAN = 1024;      // keys of one task
constexpr int TASK_ROWS = 128;  // query rows of one task, unless a token has more heads
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
    size_t elements = size_t(whole_groups(rows)) * blocks * BLOCK + size_t(blocks) * PANEL_BLOCK + size_t(blocks) * BLOCK;
    return elements * sizeof(E) + size_t(whole_groups(rows)) * PANEL * sizeof(float) + 4 * 64;
  }

  Space(char* memory, int rows, int blocks) {
    Carver carver(memory);
    queries = carver.take<E>(size_t(whole_groups(rows)) * blocks * BLOCK);
    panel = carver.take<E>(size_t(blocks) * PANEL_BLOCK);
    zero = carver.take<E>(size_t(blocks) * BLOCK);
    sums = carver.take<float>(size_t(whole_groups(rows)) * PANEL);
  }
};

template <class E>
class Scorer {
 public:
  Scorer(const Isa& isa, const IndexQueries<E>& i, const Batch& batch)
      : loops_(isa.of<E>()), i_(i), batch_(batch), blocks_(ceil_div(i.keys.size, BLOCK)) {}

  // Scores of a span of keys for a tile's tokens; of keys that one of them does not see, any. False: there is no such block.
  bool score(const Tile& tile, int first, char* memory, float* scores) const {
    int rows = tile.tokens * i_.heads, last = std::min(first + SPAN, tile.keys());
    Space<E> w(memory, rows, blocks_);
    memset(w.zero, 0, size_t(blocks_) * BLOCK * sizeof(E));
    take_queries(tile, rows, w);
    for (int key = first; key < last; key += CHUNK) {
      const E* row[CHUNK];
      if (!point_at_keys(tile.sequence, key, std::min(key + CHUNK, last), w.zero, row)) return false;
      loops_.pack_keys(row, CHUNK, i_.keys.size, blocks_, w.panel);
      loops_.gemm(w.queries, size_t(blocks_) * BLOCK, rows, w.panel, blocks_, w.sums, false, {});
      for (int n = 0; n < tile.tokens; n++)
        add_heads(w.sums + size_t(n) * i_.heads * PANEL, i_.weight + size_t(tile.token + n) * i_.heads,
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

  // One token's scores of a chunk, head after head. What is no number stays none.
  void add_heads(const float* sum, const float* weight, float* score) const {
    float total[CHUNK] = {};
    for (int h = 0; h < i_.heads; h++, sum += PANEL) {
      float w = weight[h];
      for (int j = 0; j < CHUNK; j++) total[j] += w * (sum[j] <= 0.0f ? 0.0f : sum[j]);
    }
    memcpy(score, total, sizeof total);
  }

  const Loops<E>& loops_;
  const IndexQueries<E>& i_;
  const Batch& batch_;
  const int blocks_;
};

// Higher for a higher score, and highest for what is no number. Both zeros are equal.
uint32_t rank(float score) {
  if (score != score) return std::numeric_limits<uint32_t>::max();
  score += 0.0f;
  uint32_t bits;
  memcpy(&bits, &score, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The positions of the `top` best of more scores than that: `kept` has room for 2 top, `seen` a bit for each position.
template <class Take>
void best(const float* score, int count, int top, uint64_t* kept, uint64_t* seen, const Take& take) {
  int held = 0;
  uint64_t least = 0;
  auto shrink = [&] {
    std::nth_element(kept, kept + top - 1, kept + held, std::greater<uint64_t>());
    held = top;
    least = kept[top - 1];
  };
  for (int p = 0; p < count; p++) {
    uint64_t one = uint64_t(rank(score[p])) << 32 | uint32_t(~p);  // an earlier position is higher
    if (one <= least) continue;
    kept[held++] = one;
    if (held == 2 * top) shrink();
  }
  if (held > top) shrink();
  int words = ceil_div(count, 64);
  std::fill(seen, seen + words, 0);
  for (int k = 0; k < held; k++) {
    uint32_t p = ~uint32_t(kept[k]);
    seen[p / 64] |= uint64_t(1) << p % 64;
  }
  for (int word = 0; word < words; word++)
    for (uint64_t bits = seen[word]; bits; bits &= bits - 1) take(word * 64 + __builtin_ctzll(bits));
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
    size_t words = size_t(ceil_div(longest, 64)) + 2 * size_t(i_.top);
    engine_.reserve(std::max(Space<E>::bytes(most, ceil_div(i_.keys.size, BLOCK)), words * sizeof(uint64_t)));
    engine_.pool.run_within(int(spans.size()), [&](int index, int thread) {
      const Span& span = spans[index];
      if (!scorer_.score(tiles_[span.tile], span.first, engine_.scratch<char>(thread), scores)) bad_ = true;
    });
    if (!bad_)
      engine_.pool.run(int(rows.size()), [&](int index, int thread) {
        const Tile& tile = tiles_[rows[index].first];
        int n = rows[index].second;
        uint64_t* kept = engine_.scratch<uint64_t>(thread);
        Slots to = slots(tile.sequence, tile.token + n);
        best(scores + tile.score + n * tile.stride, tile.position + n + 1, i_.top, kept, kept + 2 * size_t(i_.top),
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
