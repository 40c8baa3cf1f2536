#include "predictor.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "rows.h"

namespace {

constexpr int TOGETHER = 16;  // rows whose logits are in memory at once

// One more row of each sequence that goes on, as a batch.
struct Further {
  std::vector<int32_t> start{0}, context, table;
  std::vector<int64_t> token, position, slot;

  Batch batch(size_t stride) const {
    int rows = int(token.size());
    return {start.data(), context.data(), table.data(), stride, rows, position.data(), slot.data(), rows};
  }
};

// What one call computes with: the rows of its first pass, and room for those of the others.
template <class E>
class Drafting {
 public:
  Drafting(Engine& engine, const PredictorParts& parts, const Stack& layer, const Batch& first, const DraftRows<E>& rows,
           Memory& memory, Memory& logits)
      : engine_(engine), parts_(parts), layer_(layer), first_(first), rows_(rows), hidden_(layer.hidden()),
        most_(std::max(first.tokens, first.sequences)),
        logits_(logits.at_least<float>(size_t(std::min(TOGETHER, first.sequences)) * parts.head->outputs())),
        product_(first.sequences, 1.0f) {
    x_ = memory.at_least<E>(size_t(most_) * hidden_ * 6);
    beside_ = x_ + size_t(most_) * hidden_;
    both_ = beside_ + size_t(most_) * hidden_;
    normed_ = both_ + size_t(most_) * hidden_ * 2;
    read_ = normed_ + size_t(most_) * hidden_;
  }

  int run() {
    std::fill(rows_.drafted, rows_.drafted + size_t(first_.sequences) * rows_.deepest, -1);
    std::vector<int> going;
    pass(first_, rows_.token, rows_.hidden);
    for (int s = 0; s < first_.sequences; s++)
      if (rows_.most[s] > 0) going.push_back(s);
    for (size_t at = 0; at < going.size(); at++) {
      int row = rows_.row[going[at]];
      if (row < 0 || row >= first_.tokens) throw std::out_of_range("row " + std::to_string(row));
      read(at, row);
    }
    for (int depth = 0; !going.empty(); depth++) {
      going = choose(going, depth);
      if (going.empty()) break;
      Further more;
      for (int s : going) add(more, s, depth);
      pass(more.batch(first_.table_stride), more.token.data(), read_);
      for (size_t at = 0; at < going.size(); at++) read(at, at);
    }
    return done_;
  }

 private:
  // normed_ = what the layer makes of these rows, ready to be read by the head and by the next pass.
  void pass(const Batch& batch, const int64_t* token, const E* hidden) {
    int rows = batch.tokens;
    parts_.embed.read(engine_, token, rows, x_);
    norm(x_, rows, parts_.embedding_norm, beside_);
    norm(hidden, rows, parts_.hidden_norm, normed_);
    for (int r = 0; r < rows; r++) {
      memcpy(both_ + size_t(r) * 2 * hidden_, beside_ + size_t(r) * hidden_, hidden_ * sizeof(E));
      memcpy(both_ + size_t(r) * 2 * hidden_ + hidden_, normed_ + size_t(r) * hidden_, hidden_ * sizeof(E));
    }
    parts_.join->run(engine_, both_, 2 * size_t(hidden_), rows, x_, hidden_);
    layer_.run(engine_, {&batch}, StackRows<E>{x_, rows_.expert + size_t(done_) * layer_.top_k(), nullptr});
    done_ += rows;
    norm(x_, rows, parts_.last_norm, normed_);
  }

  void norm(const E* x, int rows, const void* weight, E* out) {
    rms_norm(engine_, x, hidden_, rows, hidden_, static_cast<const E*>(weight), parts_.eps, out);
  }

  void read(size_t at, size_t row) {
    memcpy(read_ + at * hidden_, normed_ + row * hidden_, hidden_ * sizeof(E));
  }

  // The likeliest token behind each sequence's row of read_; who goes on, whose rows are moved to the front.
  std::vector<int> choose(const std::vector<int>& going, int depth) {
    std::vector<int> on;
    int vocabulary = parts_.head->outputs();
    for (size_t begin = 0; begin < going.size(); begin += TOGETHER) {
      int count = int(std::min(going.size() - begin, size_t(TOGETHER)));
      parts_.head->run(engine_, read_ + begin * hidden_, hidden_, count, logits_, vocabulary);
      for (int r = 0; r < count; r++) {
        int s = going[begin + r];
        float* logits = logits_ + size_t(r) * vocabulary;
        int token = engine_.isa->argmax(logits, vocabulary);
        if (token < 0) continue;  // its experts gave no sum
        size_t place = size_t(s) * rows_.deepest + depth;
        if (parts_.logit_scale != 1.0f)
          for (int v = 0; v < vocabulary; v++) logits[v] *= parts_.logit_scale;
        float likely = 1.0f / engine_.isa->exp_all(logits, logits[token], vocabulary);
        rows_.drafted[place] = token;
        rows_.likely[place] = likely;
        product_[s] *= likely;
        bool room = size_t(rows_.place[s] + depth) / rows_.block_size < first_.table_stride;
        if (depth + 1 >= rows_.most[s] || product_[s] < rows_.least || !room) continue;
        memmove(read_ + on.size() * hidden_, read_ + (begin + r) * hidden_, hidden_ * sizeof(E));
        on.push_back(s);
      }
    }
    return on;
  }

  // The row behind what sequence s has drafted to this depth.
  void add(Further& more, int s, int depth) const {
    int at = rows_.place[s] + depth;
    const int32_t* table = first_.table + s * first_.table_stride;
    more.token.push_back(rows_.drafted[size_t(s) * rows_.deepest + depth]);
    more.position.push_back(at + 1);
    more.slot.push_back(int64_t(table[at / rows_.block_size]) * rows_.block_size + at % rows_.block_size);
    more.context.push_back(at + 1);
    more.start.push_back(int32_t(more.token.size()));
    more.table.insert(more.table.end(), table, table + first_.table_stride);
  }

  Engine& engine_;
  const PredictorParts& parts_;
  const Stack& layer_;
  const Batch& first_;
  const DraftRows<E>& rows_;
  int hidden_, most_, done_ = 0;
  float* logits_;
  std::vector<float> product_;
  E *x_, *beside_, *both_, *normed_, *read_;
};

void expect(const char* what, int found, int wanted) {
  if (found != wanted)
    throw std::invalid_argument(std::string(what) + " " + std::to_string(found) + ", expected " + std::to_string(wanted));
}

}  // namespace

Predictor::Predictor(PredictorParts parts, std::shared_ptr<Stack> layer) : parts_(std::move(parts)), layer_(std::move(layer)) {
  expect("inputs of join", parts_.join->inputs(), 2 * layer_->hidden());
  expect("outputs of join", parts_.join->outputs(), layer_->hidden());
  expect("inputs of head", parts_.head->inputs(), layer_->hidden());
  expect("columns of the embedding", parts_.embed.size, layer_->hidden());
  expect("vocabulary", parts_.head->outputs(), parts_.embed.rows);
}

template <class E>
int Predictor::draft(Engine& engine, const Batch& batch, const DraftRows<E>& rows) const {
  return Drafting<E>(engine, parts_, *layer_, batch, rows, rows_, logits_).run();
}

template int Predictor::draft(Engine&, const Batch&, const DraftRows<bf16>&) const;
template int Predictor::draft(Engine&, const Batch&, const DraftRows<float>&) const;
