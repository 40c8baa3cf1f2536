#include "delta.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Of a head's values, computed together: with 128 keys 32 KiB, which stay in the first-level cache.
constexpr int COLUMNS = PANEL;

// One sequence's tokens of a call.
struct Span {
  int first, count;  // among the call's tokens
  int position;      // of the first
  const int32_t* table;

  int block(int position, int size) const { return table[position / size]; }
};

Span span_of(const Batch& batch, int s) {
  int first = batch.query_start[s], count = batch.query_start[s + 1] - first;
  return {first, count, batch.context[s] - count, batch.table + s * batch.table_stride};
}

void check(const Span& span, const States& states) {
  int first = (span.position ? span.position - 1 : 0) / states.block_size;
  for (int b = first; b <= (span.position + span.count - 1) / states.block_size; b++)
    if (span.table[b] < 0 || span.table[b] >= states.blocks)
      throw std::out_of_range("block_table_SB: " + std::to_string(span.table[b]) + ", the cache has " +
                              std::to_string(states.blocks) + " blocks");
}

// The state before a sequence's first token; null for one that begins.
const float* before(const Span& span, const States& states) {
  if (!span.position) return nullptr;
  return states.data + size_t(span.block(span.position - 1, states.block_size)) * states.stride;
}

// The convolution of one token.
void tap(const Isa& isa, const DeltaNet& net, const Span& span, const float* mixed, const float* state, int token,
         float* out) {
  int channels = net.channels();
  if (net.bias)
    memcpy(out, net.bias, channels * sizeof(float));
  else
    memset(out, 0, channels * sizeof(float));
  for (int tap = 0; tap < net.taps; tap++) {
    int from = token - (net.taps - 1) + tap;  // a token of this span, or below 0 a row of the state's window
    const float* row = nullptr;
    if (from >= 0)
      row = mixed + size_t(span.first + from) * channels;
    else if (state)
      row = state + net.matrix() + size_t(net.taps - 1 + from) * channels;
    if (row) isa.add_product(out, row, net.conv + size_t(tap) * channels, channels);
  }
}

// Queries, keys and values of one token: convolution, SiLU, queries and keys of length 1, queries scaled; or as they are.
void mix(const Isa& isa, const DeltaNet& net, const Span& span, const float* mixed, const float* state, int token,
         float* out) {
  tap(isa, net, span, mixed, state, token, out);
  isa.silu_all(out, net.channels());
  if (net.rule == DeltaRule::sum) return;
  for (int h = 0; h < 2 * net.key_heads; h++)
    isa.unit(out + h * net.key, net.key, h < net.key_heads ? 1.0f / sqrtf(float(net.key)) : 1.0f);
}

// One head of one sequence. Its matrix is copied to scratch row by row, so memory is read in the order of addresses: panels
// of COLUMNS columns of all keys, one behind the other. Behind them is room for a value, a result and a number for each key.
struct Head {
  const DeltaNet& net;
  const Span& span;
  const States& states;
  int head;
  float* scratch;

  int panels() const { return ceil_div(net.value, COLUMNS); }
  int columns(int panel) const { return std::min(net.value - panel * COLUMNS, COLUMNS); }
  float* row(int panel, int key) const { return scratch + (size_t(panel) * net.key + key) * COLUMNS; }
  size_t place(int key) const { return (size_t(head) * net.key + key) * net.value; }

  void read(const float* state) const {
    for (int key = 0; key < net.key; key++)
      for (int p = 0; p < panels(); p++) {
        memset(row(p, key), 0, COLUMNS * sizeof(float));
        if (state) memcpy(row(p, key), state + place(key) + p * COLUMNS, columns(p) * sizeof(float));
      }
  }

  void leave(int position) const {
    float* state = states.data + size_t(span.block(position, states.block_size)) * states.stride;
    for (int key = 0; key < net.key; key++)
      for (int p = 0; p < panels(); p++)
        memcpy(state + place(key) + p * COLUMNS, row(p, key), columns(p) * sizeof(float));
  }

  void run(const Isa& isa, const DeltaTokens& rows, const float* mixed) const {
    for (int first = 0; first < span.count;) {
      int left = states.block_size - (span.position + first) % states.block_size;
      int end = std::min(first + left, span.count);
      for (int p = 0; p < panels(); p++)
        for (int t = first; t < end; t++) token(isa, rows, mixed, p, t);
      leave(span.position + end - 1);
      first = end;
    }
  }

  void token(const Isa& isa, const DeltaTokens& rows, const float* mixed, int panel, int t) const {
    float *value = row(panels(), 0), *out = value + COLUMNS, *keep = out + COLUMNS;
    int keys = net.key_heads * net.key, key = head / (net.value_heads / net.key_heads) * net.key;
    const float* of_token = mixed + size_t(span.first + t) * net.channels();
    size_t at = size_t(span.first + t) * net.value_heads + head;
    memset(value, 0, COLUMNS * sizeof(float));
    memcpy(value, of_token + 2 * keys + head * net.value + panel * COLUMNS, columns(panel) * sizeof(float));
    const float *q = of_token + key, *k = q + keys;
    if (net.rule == DeltaRule::channel) {
      memcpy(keep, rows.decay + at * net.key, net.key * sizeof(float));
      isa.exp_all(keep, 0.0f, net.key);
      isa.delta_channels(row(panel, 0), net.key, q, k, value, keep, rows.beta[at], out);
    } else if (net.rule == DeltaRule::sum) {
      isa.delta_sum(row(panel, 0), net.key, q, k, value, expf(rows.decay[at]), rows.beta[at], out);
    } else {
      isa.delta_token(row(panel, 0), net.key, q, k, value, expf(rows.decay[at]), rows.beta[at], out);
    }
    if (net.skip) isa.add_scaled(out, out, value, net.skip[head], COLUMNS);
    memcpy(rows.out + at * net.value + panel * COLUMNS, out, columns(panel) * sizeof(float));
  }
};

// The last inputs of the convolution, in every block that a sequence reaches. From the last block to the first: the
// first one may be where the window of before lies.
void leave_windows(const DeltaNet& net, const Span& span, const float* mixed, const States& states, const float* state) {
  size_t channels = net.channels();
  for (int end = span.count; end > 0; end = (span.position + end - 1) / states.block_size * states.block_size - span.position) {
    float* block = states.data + size_t(span.block(span.position + end - 1, states.block_size)) * states.stride;
    for (int r = 0; r < net.taps - 1; r++) {
      int from = end - (net.taps - 1) + r;
      float* to = block + net.matrix() + r * channels;
      if (from >= 0)
        memcpy(to, mixed + (span.first + from) * channels, channels * sizeof(float));
      else if (state)
        memmove(to, state + net.matrix() + (net.taps - 1 + from) * channels, channels * sizeof(float));
      else
        memset(to, 0, channels * sizeof(float));
    }
  }
}

std::vector<Span> spans_of(const Batch& batch, const States& states) {
  std::vector<Span> spans;
  for (int s = 0; s < batch.sequences; s++) {
    spans.push_back(span_of(batch, s));
    check(spans[s], states);
  }
  return spans;
}

// out (tokens, channels) = what `make` makes of every token: `tap` or `mix`.
template <class Make>
void by_tokens(Engine& engine, const DeltaNet& net, const std::vector<Span>& spans, const float* x, const States& states,
               const Batch& batch, const Make& make, float* out) {
  std::vector<int> span_of_token(batch.tokens);
  for (size_t s = 0; s < spans.size(); s++)
    for (int t = 0; t < spans[s].count; t++) span_of_token[spans[s].first + t] = int(s);
  engine.pool.run(batch.tokens, [&](int t, int) {
    const Span& span = spans[span_of_token[t]];
    make(*engine.isa, net, span, x, before(span, states), t - span.first, out + size_t(t) * net.channels());
  });
}

}  // namespace

void convolve(Engine& engine, const DeltaNet& net, const float* x, float* out, const States& states, const Batch& batch) {
  std::vector<Span> spans = spans_of(batch, states);
  by_tokens(engine, net, spans, x, states, batch, tap, out);
  engine.pool.run(batch.sequences, [&](int s, int) { leave_windows(net, spans[s], x, states, before(spans[s], states)); });
}

void delta(Engine& engine, const DeltaNet& net, const DeltaTokens& rows, const States& states, const Batch& batch) {
  std::vector<Span> spans = spans_of(batch, states);
  float* mixed = engine.shared[0].at_least<float>(size_t(batch.tokens) * net.channels());
  by_tokens(engine, net, spans, rows.mixed, states, batch, mix, mixed);
  engine.reserve(((size_t(ceil_div(net.value, COLUMNS)) * net.key + 2) * COLUMNS + net.key) * sizeof(float));
  engine.pool.run(batch.sequences * net.value_heads, [&](int index, int worker) {
    const Span& span = spans[index / net.value_heads];
    if (!span.count) return;
    Head head{net, span, states, index % net.value_heads, engine.scratch<float>(worker)};
    head.read(before(span, states));
    head.run(*engine.isa, rows, mixed);
  });
  engine.pool.run(batch.sequences, [&](int s, int) {
    leave_windows(net, spans[s], rows.mixed, states, before(spans[s], states));
  });
}
