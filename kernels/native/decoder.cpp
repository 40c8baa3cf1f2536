#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "carver.h"
#include "pointwise.h"
#include "router.h"
#include "rows.h"

namespace {

// The next row of each sequence over one group's block tables.
struct NextRows {
  const Batch& first;
  int block_size;
  std::vector<int32_t> context;
  std::vector<int64_t> position, slot;

  NextRows(const Batch& batch, int size)
      : first(batch), block_size(size), context(batch.context, batch.context + batch.sequences),
        position(batch.position, batch.position + batch.tokens), slot(batch.slot, batch.slot + batch.tokens) {}

  Batch batch() const {
    return {first.query_start, context.data(), first.table, first.table_stride, first.sequences, position.data(), slot.data(), first.tokens};
  }

  void move_on() {
    for (int s = 0; s < first.sequences; s++) {
      int64_t at = ++position[s], block = at / block_size;
      if (size_t(block) >= first.table_stride)
        throw std::out_of_range("position " + std::to_string(at) + ": block tables of " + std::to_string(first.table_stride));
      context[s]++;
      slot[s] = first.table[s * first.table_stride + block] * int64_t(block_size) + at % block_size;
    }
  }
};

void expect(const char* what, int found, int wanted) {
  if (found != wanted)
    throw std::invalid_argument(std::string(what) + " " + std::to_string(found) + ", expected " + std::to_string(wanted));
}

bool stops(const std::vector<std::vector<int>>& stops, const int32_t* drawn, int sequences) {
  for (int s = 0; s < sequences; s++)
    if (std::count(stops[s].begin(), stops[s].end(), drawn[s])) return true;
  return false;
}

}  // namespace

Decoder::Decoder(DecoderParts parts, std::shared_ptr<Stack> layers) : parts_(std::move(parts)), layers_(std::move(layers)) {
  expect("inputs of head", parts_.head->inputs(), layers_->hidden());
  expect("columns of the embedding", parts_.embed.size, layers_->hidden());
  expect("vocabulary", parts_.head->outputs(), parts_.embed.rows);
}

template <class E>
Decoded Decoder::decode(Engine& engine, const std::vector<const Batch*>& groups, const DecodeRows& rows) const {
  int sequences = groups.at(0)->sequences, vocabulary = parts_.embed.rows;
  size_t hidden = layers_->hidden(), chosen = size_t(layers_->moe_layers()) * sequences * layers_->top_k();
  expect("rows", groups[0]->tokens, sequences);
  expect("block sizes", int(rows.block_sizes.size()), int(groups.size()));
  if (rows.passes > 1) expect("lists of stop tokens", int(rows.stops.size()), sequences);
  std::vector<NextRows> next;
  for (size_t g = 0; g < groups.size(); g++) next.emplace_back(*groups[g], rows.block_sizes[g]);
  Carver carver(rows_.at_least<char>(sequences * (2 * hidden * sizeof(E) + sizeof(int32_t)) + 3 * 64));
  E *x = carver.take<E>(sequences * hidden), *normed = carver.take<E>(sequences * hidden);
  int32_t* bad = carver.take<int32_t>(sequences);
  float* logits = logits_.at_least<float>(size_t(sequences) * vocabulary);
  std::vector<int64_t> token(rows.token, rows.token + sequences);

  Decoded done{0, 0, false};
  while (done.passes < rows.passes) {
    int32_t* drawn = rows.drawn + size_t(done.passes) * sequences;
    if (done.passes) token.assign(drawn - sequences, drawn);
    parts_.embed.read(engine, token.data(), sequences, x);
    if (parts_.embedding_scale != 1.0f) scale_rows(engine, x, sequences, int(hidden), parts_.embedding_scale);
    std::vector<Batch> batches;
    for (const NextRows& one : next) batches.push_back(one.batch());
    std::vector<const Batch*> tables;
    for (const Batch& one : batches) tables.push_back(&one);
    std::fill(bad, bad + sequences, -1);
    StackRows<E> stacked{x, rows.expert + done.passes * chosen, bad};
    int longest = *std::max_element(next[0].context.begin(), next[0].context.end());
    if (parts_.top && longest > parts_.top) {  // else each token attends all that it sees
      stacked.slot = slots_.at_least<int32_t>(size_t(sequences) * parts_.top), stacked.most = parts_.top;
      std::fill(stacked.slot, stacked.slot + size_t(sequences) * parts_.top, 0);
    }
    done.ffn_seconds += layers_->run(engine, tables, stacked).ffn_seconds;
    done.spoiled = std::any_of(bad, bad + sequences, [](int32_t layer) { return layer >= 0; });
    if (done.spoiled) break;
    const E *norm = static_cast<const E*>(parts_.last_norm), *bias = static_cast<const E*>(parts_.last_bias);
    if (parts_.centred)
      centre_rows(engine, x, sequences, int(hidden), norm, bias, parts_.eps, normed);
    else
      rms_norm(engine, x, hidden, sequences, int(hidden), norm, parts_.eps, normed);
    parts_.head->run(engine, normed, hidden, sequences, logits, vocabulary);
    if (parts_.logit_scale != 1.0f)
      engine.pool.run(sequences, [&](int s, int) { scale_row(logits + size_t(s) * vocabulary, vocabulary, parts_.logit_scale); });
    if (parts_.logit_cap > 0.0f) cap_rows(engine, logits, sequences, vocabulary, parts_.logit_cap);
    argmax(engine, logits, sequences, vocabulary, drawn);
    done.spoiled = std::any_of(drawn, drawn + sequences, [](int32_t token) { return token < 0; });
    if (done.spoiled) break;
    if (++done.passes == rows.passes || stops(rows.stops, drawn, sequences)) break;
    for (NextRows& one : next) one.move_on();
  }
  return done;
}

template Decoded Decoder::decode<bf16>(Engine&, const std::vector<const Batch*>&, const DecodeRows&) const;
template Decoded Decoder::decode<float>(Engine&, const std::vector<const Batch*>&, const DecodeRows&) const;
