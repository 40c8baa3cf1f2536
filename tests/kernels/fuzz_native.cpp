// Runs every op of the native library on random shapes, twice: with heap buffers of exactly the right size, which
// AddressSanitizer watches, and with buffers that end at an unreadable page, which also catches instructions it does
// not instrument (AMX tile loads). Prints the number of calls; any fault ends the process.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <cmath>
#include <random>
#include <stdexcept>

#include <atomic>
#include <thread>

#include "attention.h"
#include "delta.h"
#include "pointwise.h"
#include "states.h"
#include "experts.h"
#include "flags.h"
#include "layer.h"
#include "linear.h"
#include "mla.h"

namespace {

std::mt19937 random_bits(1);
bool guarded = false;
long calls = 0;

int up_to(int n) { return int(random_bits() % unsigned(n)) + 1; }
float noise() { return float(int(random_bits() % 2001) - 1000) / 1000.0f; }

// Few as often as many, since products of few rows have loops of their own.
int some_rows() { return random_bits() % 2 ? up_to(140) - 1 : up_to(26) - 1; }

template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : bytes_(count * sizeof(T)) {
    if (!guarded) {
      data_ = static_cast<T*>(malloc(bytes_ ? bytes_ : 1));
      return;
    }
    constexpr size_t page = 4096;
    span_ = (bytes_ + page - 1) / page * page + page;
    base_ = static_cast<char*>(mmap(nullptr, span_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + span_ - page, page, PROT_NONE);
    data_ = reinterpret_cast<T*>(base_ + span_ - page - bytes_);
  }
  ~Buffer() {
    if (base_)
      munmap(base_, span_);
    else
      free(data_);
  }
  Buffer(const Buffer&) = delete;
  T* get() { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  size_t size() const { return bytes_ / sizeof(T); }

 private:
  T* data_;
  char* base_ = nullptr;
  size_t bytes_, span_ = 0;
};

void set(float& x, float v) { x = v; }
void set(bf16& x, float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  x.bits = uint16_t(u >> 16);
}

template <class E>
void fill(Buffer<E>& b) {
  for (size_t i = 0; i < b.size(); i++) set(b[i], noise());
}

// Rows of which one in a hundred numbers is none, in one fill of four.
template <class E>
void fill_rows(Buffer<E>& b) {
  fill(b);
  if (random_bits() % 4) return;
  for (size_t i = 0; i < b.size(); i += size_t(up_to(200))) set(b[i], random_bits() % 2 ? NAN : INFINITY);
}

Bits some_bits() { return random_bits() % 2 ? Bits::whole : random_bits() % 2 ? Bits::int8 : Bits::fp8; }

// So many rows of a cache, in 8 bits codes with or without scales behind them. A stride is one row's, in elements or in bytes.
template <class E>
struct CacheRows {
  CacheRows(size_t rows, int size, Bits bits, bool scales = true)
      : stride(size + (bits != Bits::whole && scales ? SCALE_BYTES : 0)),
        row_bytes(stride * (bits == Bits::whole ? sizeof(E) : 1)),
        bytes(rows * row_bytes) {
    Buffer<E> numbers(size);
    for (size_t r = 0; r < rows; r++) {
      uint8_t* to = bytes.get() + r * row_bytes;
      fill(numbers);
      if (bits == Bits::whole) {
        memcpy(to, numbers.get(), row_bytes);
        continue;
      }
      float scale = to_eight(numbers.get(), size, bits, to);
      for (size_t at = size; at < stride; at += sizeof scale) memcpy(to + at, &scale, sizeof scale);
    }
  }
  E* get() { return reinterpret_cast<E*>(bytes.get()); }

  size_t stride, row_bytes;
  Buffer<uint8_t> bytes;
};

template <class E>
Dtype code();
template <>
Dtype code<float>() {
  return Dtype::f32;
}
template <>
Dtype code<bf16>() {
  return Dtype::bf16;
}

// How weights are kept: as int8, compact where the engine can, or as they are.
template <class E>
Dtype kept(const Engine& engine, bool int8) {
  if (int8) return Dtype::i8;
  bool compact = code<E>() == Dtype::bf16 && engine.isa->expand && random_bits() % 2;
  return compact ? Dtype::compact : code<E>();
}

template <class E>
Source source(Buffer<E>& b, size_t stride) {
  return {b.get(), code<E>(), stride};
}

// int4 weights in groups that may be longer than all inputs.
struct Codes {
  Groups groups;
  Buffer<int8_t> code;
  Buffer<float> scale;

  Codes(int outputs, int inputs, Groups of) : groups(of), code(size_t(outputs) * inputs),
        scale(size_t(outputs) * ((inputs + of.inputs - 1) / of.inputs)) {
    for (size_t i = 0; i < code.size(); i++) code[i] = of.e2m1 ? E2M1_TWICE[random_bits() % 16] : int8_t(int(random_bits() % 16) - 8);
    for (size_t i = 0; i < scale.size(); i++) scale[i] = 0.25f;
  }
  Int4Source source() { return {code.get(), scale.get()}; }
};

Groups some_groups() { return {BLOCK * up_to(4), bool(random_bits() % 2), bool(random_bits() % 2)}; }

// A map with weights of any kind that there is.
template <class E>
std::shared_ptr<Linear> linear_map(const Engine& engine, int outputs, int inputs) {
  if (random_bits() % 3 == 0) {
    Codes codes(outputs, inputs, some_groups());
    auto map = std::make_shared<Linear>(outputs, inputs, Dtype::i4, codes.groups);
    map->pack_int4(codes.source());
    return map;
  }
  auto map = std::make_shared<Linear>(outputs, inputs, kept<E>(engine, random_bits() % 2));
  Buffer<E> w(size_t(outputs) * inputs);
  fill(w);
  map->pack(source(w, inputs));
  return map;
}

// The same for one map per head.
template <class E>
std::shared_ptr<HeadLinear> head_map(const Engine& engine, int heads, int outputs, int inputs) {
  if (random_bits() % 3 == 0) {
    Codes codes(outputs, inputs, some_groups());
    auto map = std::make_shared<HeadLinear>(heads, outputs, inputs, Dtype::i4, codes.groups);
    for (int h = 0; h < heads; h++) map->pack_int4(h, codes.source());
    return map;
  }
  auto map = std::make_shared<HeadLinear>(heads, outputs, inputs, kept<E>(engine, random_bits() % 2));
  Buffer<E> w(size_t(outputs) * inputs);
  fill(w);
  for (int h = 0; h < heads; h++) map->pack(h, source(w, inputs));
  return map;
}

template <class E>
void linear(Engine& engine) {
  int rows = some_rows(), inputs = up_to(300), outputs = up_to(150), heads = up_to(4);
  auto map = linear_map<E>(engine, outputs, inputs);
  auto by_head = head_map<E>(engine, heads, outputs, inputs);
  Buffer<E> bias(outputs), x(size_t(rows) * heads * inputs), out(size_t(rows) * heads * outputs);
  fill(bias), fill_rows(x);
  map->set_bias(source(bias, 0));
  map->run(engine, x.get(), size_t(heads) * inputs, rows, out.get(), outputs);
  by_head->run(engine, x.get(), size_t(heads) * inputs, inputs, rows, out.get(), size_t(heads) * outputs, outputs);
  Buffer<float> wide(size_t(rows) * outputs);
  map->run(engine, x.get(), size_t(heads) * inputs, rows, wide.get(), outputs);
  calls += 3;
}

// More inputs than sums of whole numbers hold.
template <class E>
void long_rows(Engine& engine) {
  int inputs = MOST_INT8_INPUTS + up_to(100), rows = up_to(20);
  auto map = linear_map<E>(engine, 5, inputs);
  Buffer<E> x(size_t(rows) * inputs), out(size_t(rows) * 5);
  fill(x);
  map->run(engine, x.get(), inputs, rows, out.get(), 5);
  calls++;
}

void set_biases(Experts& bank, int slot, int hidden, int inner) {  // also of a bank without gates, which has fewer
  Buffer<float> gate_up(2 * inner), down(hidden);
  fill(gate_up), fill(down);
  bank.set_bias(slot, gate_up.get(), down.get());
}

template <class E>
std::shared_ptr<Experts> bank_of(const Engine& engine, int slots, int hidden, int inner) {
  bool biased = random_bits() % 2;
  Gating gating{random_bits() % 2 == 0, 0.5f, 1.7f, false, random_bits() % 4 == 0, random_bits() % 4 == 0};
  int joined = gating.squared ? inner : 2 * inner;
  if (random_bits() % 3 == 0) {
    Groups groups = some_groups();
    auto bank = std::make_shared<Experts>(slots, hidden, inner, Dtype::i4, groups, biased, gating);
    for (int s = 0; s < slots; s++) {
      Codes gate_up(joined, hidden, groups), down(hidden, inner, groups);
      bank->pack_int4(s, gate_up.source(), down.source());
      if (biased) set_biases(*bank, s, hidden, inner);
    }
    return bank;
  }
  if (code<E>() == Dtype::bf16 && !gating.squared && random_bits() % 3 == 0) {
    auto bank = std::make_shared<Experts>(slots, hidden, inner, Dtype::fp8, Groups{}, biased, gating);
    auto blocks = [](int outputs, int inputs) { return (outputs + 127) / 128 * ((inputs + 127) / 128); };
    for (int s = 0; s < slots; s++) {
      Buffer<uint8_t> gate_up(size_t(2 * inner) * hidden), down(size_t(hidden) * inner);
      Buffer<float> up_scale(2 * blocks(inner, hidden)), down_scale(blocks(hidden, inner));
      for (size_t i = 0; i < gate_up.size(); i++) gate_up[i] = uint8_t(random_bits());
      for (size_t i = 0; i < down.size(); i++) down[i] = uint8_t(random_bits());
      for (size_t i = 0; i < up_scale.size(); i++) up_scale[i] = 0.01f;
      for (size_t i = 0; i < down_scale.size(); i++) down_scale[i] = 0.01f;
      bank->pack_fp8(s, {gate_up.get(), up_scale.get(), inner}, {down.get(), down_scale.get(), hidden});
      if (biased) set_biases(*bank, s, hidden, inner);
    }
    return bank;
  }
  auto bank = std::make_shared<Experts>(slots, hidden, inner, kept<E>(engine, random_bits() % 2), Groups{}, biased, gating);
  for (int s = 0; s < slots; s++) {
    Buffer<E> gate_up(size_t(joined) * hidden), down(size_t(hidden) * inner);
    fill(gate_up), fill(down);
    Source both = source(gate_up, hidden);
    if (joined == 2 * inner && s % 2) both.second = gate_up.get() + size_t(inner) * hidden, both.split = inner;
    bank->pack(s, both, source(down, inner));
    if (biased) set_biases(*bank, s, hidden, inner);
  }
  return bank;
}

template <class E>
void experts(Engine& engine) {
  int slots = up_to(5), hidden = up_to(140), inner = up_to(100), rows = some_rows(), choices = up_to(3);
  auto bank = bank_of<E>(engine, slots, hidden, inner);
  Buffer<E> x(size_t(rows) * hidden), out(size_t(rows) * hidden);
  Buffer<int32_t> slot(size_t(rows) * choices);
  Buffer<float> weight(size_t(rows) * choices);
  fill_rows(x), fill(out), fill(weight);
  for (size_t i = 0; i < slot.size(); i++) slot[i] = int(random_bits() % unsigned(slots + 1)) - 1;
  bank->run(engine, x.get(), hidden, slot.get(), weight.get(), rows, choices, out.get(), hidden, true);
  if (random_bits() % 2) {  // x is contiguous there, and so is what the sums are added to
    Buffer<int32_t> bad(rows);
    for (int r = 0; r < rows; r++) bad[r] = -1;
    bank->add_to(engine, x.get(), slot.get(), weight.get(), rows, choices, out.get(), bad.get(), 1);
    for (int r = 0; r < rows; r++) {
      bool finite = true;
      for (int h = 0; h < hidden; h++) finite = finite && std::isfinite(to_float(out[size_t(r) * hidden + h]));
      if (bad[r] != (finite ? -1 : 1)) abort();
    }
    calls++;
  }
  calls++;
  if (!slot.size()) return;
  slot[slot.size() - 1] = slots;
  try {
    bank->run(engine, x.get(), hidden, slot.get(), weight.get(), rows, choices, out.get(), hidden, false);
    abort();
  } catch (const std::out_of_range&) {
  }
}

template <class E>
void sums(Engine& engine) {
  int rows = up_to(40), size = up_to(150), last = rows * size - 1;
  Buffer<E> x(size_t(rows) * size), y(x.size());
  Buffer<float> wide(x.size());
  Buffer<int32_t> bad(rows), index(rows);
  fill(x), fill(y), fill(wide);
  for (int r = 0; r < rows; r++) bad[r] = -1;
  argmax(engine, wide.get(), rows, size, index.get());
  if (index[rows - 1] < 0 || index[rows - 1] >= size) abort();
  wide[last] = NAN;
  argmax(engine, wide.get(), rows, size, index.get());
  add_sums(engine, x.get(), y.get(), rows, size, bad.get(), 3);
  if (bad[0] != -1 || index[rows - 1] != -1) abort();
  add_sums(engine, x.get(), wide.get(), rows, size, bad.get(), 5);
  if (bad[rows - 1] != 5) abort();
  calls += 4;
}

// Sequences with their blocks, as PagedBatch has them.
struct Paged {
  int sequences = up_to(4), block = 1 << (random_bits() % 6), blocks = 0, tokens = 0, most = 0;
  std::vector<int> context, fresh;
  Paged() {
    for (int s = 0; s < sequences; s++) {
      context.push_back(random_bits() % 3 ? up_to(150) : up_to(1200));
      fresh.push_back(random_bits() % 2 ? 1 : up_to(std::min(context[s], 90)));
      tokens += fresh[s];
      int used = (context[s] + block - 1) / block;
      blocks += used;
      most = std::max(most, used);
    }
  }
  void write(Buffer<int32_t>& start, Buffer<int32_t>& length, Buffer<int32_t>& table, Buffer<int64_t>& position,
             Buffer<int64_t>& slot) const {
    int next = 0, t = 0;
    start[0] = 0;
    for (int s = 0; s < sequences; s++) {
      start[s + 1] = start[s] + fresh[s];
      length[s] = context[s];
      for (int b = 0; b < most; b++) table[size_t(s) * most + b] = b * block < context[s] ? next++ : -1;
      for (int p = context[s] - fresh[s]; p < context[s]; p++, t++) {
        position[t] = p;
        slot[t] = int64_t(table[size_t(s) * most + p / block]) * block + p % block;
      }
    }
  }
};

template <class E>
void layer(Engine& engine) {
  Paged paged;
  int groups = up_to(3), heads = groups * up_to(6), size = 2 * up_to(50), hidden = up_to(120), count = up_to(40);
  bool tiles = paged.block % TILE_TOKENS == 0 && random_bits() % 4;
  if (tiles) size = 16 * up_to(9);
  Buffer<int32_t> start(paged.sequences + 1), length(paged.sequences), table(size_t(paged.sequences) * paged.most);
  Buffer<int64_t> position(paged.tokens), slot(paged.tokens);
  paged.write(start, length, table, position, slot);
  Batch batch{start.get(), length.get(),   table.get(), size_t(paged.most), paged.sequences,
              position.get(), slot.get(), paged.tokens};
  Bits bits = some_bits();
  size_t group = paged.block, rows = group * groups * paged.blocks;
  CacheRows<E> keys(rows, size, bits), values(rows, size, bits, false);
  Buffer<E> x(size_t(paged.tokens) * hidden), normed(x.size()), norm(hidden), head_norm(heads * size);
  Buffer<float> cos(size_t(1200) * (size / 2)), sin(cos.size()), bias(count), sinks(heads);
  fill_rows(x), fill(norm), fill(head_norm), fill(cos), fill(sin), fill(bias), fill(sinks);
  auto packed = [&](int outputs, int inputs) { return linear_map<E>(engine, outputs, inputs); };
  int choices = up_to(std::min(4, count));
  Rule rule{choices, int(random_bits() % 3), 0, 1, 1, true, 1e-20f, 1.0f, 0.0f};
  if (count % 2 == 0 && choices <= count / 2) rule.groups = 2, rule.selection = 1 + int(random_bits() % 2);
  LayerWeights weights{norm.get(), head_norm.get(), head_norm.get(), norm.get(),
                       packed((heads + 2 * groups) * size, hidden), packed(hidden, heads * size),
                       packed(count, hidden), bias.get(), random_bits() % 2 ? sinks.get() : nullptr, rule};
  int window = random_bits() % 2 ? up_to(700) : 0;
  bool wide = random_bits() % 2;
  GqaLayer half({hidden, heads, groups, size, 1e-6f, 0.1f, window, wide, !wide && random_bits() % 2}, weights);
  Buffer<int32_t> expert(size_t(paged.tokens) * choices);
  Buffer<float> weight(size_t(paged.tokens) * choices);
  tiles &= bits == Bits::whole;
  auto store = [&](CacheRows<E>& cache, Layout layout) {
    size_t token = cache.stride;
    return Store<E>{cache.get(), token * group * groups, token * group, token, groups, size, paged.blocks, paged.block,
                    tiles ? layout : Layout::rows, bits};
  };
  Store<E> k = store(keys, Layout::key_tiles), v = store(values, Layout::value_tiles);
  Turn turn{cos.get(), sin.get(), position.get(), 1200, size / 2, false};
  half.run(engine, LayerCall<E>{x.get(), paged.tokens, turn, slot.get(), k, v, normed.get(), expert.get(),
                                weight.get()}, batch);
  for (size_t i = 0; i < expert.size(); i++)
    if (expert[i] < 0 || expert[i] >= count) abort();
  calls++;
}

template <class E>
void latent(Engine& engine) {
  Paged paged;
  int heads = up_to(80), rank = up_to(140), size = rank + up_to(40);
  Buffer<int32_t> start(paged.sequences + 1), length(paged.sequences), table(size_t(paged.sequences) * paged.most);
  Buffer<int64_t> position(paged.tokens), slot(paged.tokens);
  paged.write(start, length, table, position, slot);
  Batch batch{start.get(), length.get(),   table.get(), size_t(paged.most), paged.sequences,
              position.get(), slot.get(), paged.tokens};
  Bits bits = some_bits();
  CacheRows<E> cache(size_t(paged.block) * paged.blocks, size, bits);
  Buffer<E> q(size_t(paged.tokens) * heads * size), out(size_t(paged.tokens) * heads * rank);
  fill(q);
  size_t token = cache.stride, block = token * paged.block;
  Cache<E> keys{cache.get(), block, block, token, size, Layout::rows, bits}, values = keys;
  values.size = rank;
  attend(engine, Attention<E>{q.get(), size_t(heads) * size, size_t(size), heads, 1, keys, values, paged.blocks, paged.block,
                              0.1f, 0, out.get()}, batch);
  calls++;
}

template <class E>
void latent_half(Engine& engine) {
  Paged paged;
  int heads = up_to(9), nope = up_to(40), rope = 2 * up_to(20), value = up_to(50), rank = up_to(140);
  int hidden = up_to(120), own = random_bits() % 2 ? up_to(60) : 0, count = up_to(20), size = rank + rope;
  Buffer<int32_t> start(paged.sequences + 1), length(paged.sequences), table(size_t(paged.sequences) * paged.most);
  Buffer<int64_t> position(paged.tokens), slot(paged.tokens);
  paged.write(start, length, table, position, slot);
  Batch batch{start.get(), length.get(),   table.get(), size_t(paged.most), paged.sequences,
              position.get(), slot.get(), paged.tokens};
  bool indexed = own && random_bits() % 3, choice = false;
  Bits bits = indexed ? Bits::whole : some_bits();
  CacheRows<E> cache(size_t(paged.block) * paged.blocks, size, bits);
  size_t token = cache.stride, block = token * paged.block;
  Buffer<E> x(size_t(paged.tokens) * hidden), normed(x.size());
  Buffer<E> norm(hidden), q_norm(own), latent_norm(rank);
  Buffer<float> cos(size_t(1200) * (rope / 2)), sin(cos.size());
  fill_rows(x), fill(norm), fill(q_norm), fill(latent_norm), fill(cos), fill(sin);
  auto packed = [&](int outputs, int inputs) { return linear_map<E>(engine, outputs, inputs); };
  auto by_head = [&](int outputs, int inputs) { return head_map<E>(engine, heads, outputs, inputs); };
  int choices = up_to(std::min(4, count)), wide = heads * (nope + rope);
  Rule rule{choices, int(random_bits() % 3), 0, 1, 1, true, 1e-20f, 1.0f, 0.0f};
  MlaWeights weights{norm.get(), q_norm.get(), latent_norm.get(), norm.get(), packed((own ? own : wide) + size, hidden),
                     own ? packed(wide, own) : nullptr, by_head(rank, nope), by_head(value, rank),
                     packed(hidden, heads * value), packed(count, hidden), nullptr, rule};
  int dim = rope + up_to(60), top = up_to(300), index_heads = up_to(random_bits() % 2 ? 20 : 70);
  if (random_bits() % 2) dim = (dim + 31) / 32 * 32;
  for (int context : paged.context) choice |= indexed && context > top;
  size_t index_block = size_t(dim) * paged.block;
  Buffer<E> index(indexed ? index_block * paged.blocks : 0), index_norm(dim), index_bias(dim);
  Buffer<int32_t> chosen(choice ? size_t(paged.tokens) * top : 0);
  fill(index), fill(index_norm), fill(index_bias);
  if (indexed)
    weights.index = {packed(index_heads * dim, own), packed(dim, hidden), packed(index_heads, hidden), index_norm.get(),
                     index_bias.get()};
  MlaLayer half({hidden, heads, nope, rope, value, rank, 1e-6f, 1e-6f, 0.1f, {top, bool(random_bits() % 2)}}, weights);
  Buffer<int32_t> expert(size_t(paged.tokens) * choices);
  Buffer<float> weight(size_t(paged.tokens) * choices);
  Store<E> latents{cache.get(), block, block, token, 1, size, paged.blocks, paged.block, Layout::rows, bits};
  Turn turn{cos.get(), sin.get(), position.get(), 1200, rope / 2, bool(random_bits() % 2)};
  Store<E> keys{index.get(), index_block, index_block, size_t(dim), 1, dim, paged.blocks, paged.block, Layout::rows};
  int64_t slots = int64_t(paged.blocks) * paged.block;
  int near_rows = top + up_to(3 * top);
  Buffer<uint8_t> near_cache(size_t(near_rows) * cache.row_bytes);
  Buffer<int32_t> place_of(slots + 1), slot_of(near_rows + 1);
  Buffer<int64_t> used(near_rows + 1), counts(4);
  for (int64_t s = 0; s <= slots; s++) place_of[s] = -1;
  for (int r = 0; r <= near_rows; r++) slot_of[r] = -1, used[r] = 0;
  for (int c = 0; c < 4; c++) counts[c] = 0;
  NearRows near{reinterpret_cast<uint8_t*>(cache.get()), near_cache.get(), cache.row_bytes, near_rows, slots, place_of.get(),
                slot_of.get(), used.get(), counts.get()};
  half.run(engine, MlaCall<E>{x.get(), paged.tokens, turn, slot.get(), latents, keys, normed.get(), expert.get(),
                              weight.get(), choice ? chosen.get() : nullptr, choice ? top : 0,
                              random_bits() % 2 ? &near : nullptr}, batch);
  for (size_t i = 0; i < expert.size(); i++)
    if (expert[i] < 0 || expert[i] >= count) abort();
  for (int t = 0; choice && t < paged.tokens; t++)
    for (int k = 0; k < std::min<int64_t>(top, position[t] + 1); k++)
      if (chosen[size_t(t) * top + k] < 0 || chosen[size_t(t) * top + k] >= paged.blocks * paged.block) abort();
  calls++;
}

void gated_delta(Engine& engine) {
  Paged paged;
  DeltaNet net{up_to(3), 0, up_to(70), up_to(150), up_to(4), DeltaRule(up_to(3) - 1)};
  net.value_heads = net.key_heads * up_to(3);
  Buffer<float> conv(size_t(net.taps) * net.channels()), bias(net.channels()), skip(net.value_heads);
  net.conv = conv.get();
  if (random_bits() % 2) fill(bias), net.bias = bias.get();
  if (random_bits() % 2) fill(skip), net.skip = skip.get();
  Buffer<int32_t> start(paged.sequences + 1), length(paged.sequences), table(size_t(paged.sequences) * paged.most);
  Buffer<int64_t> position(paged.tokens), slot(paged.tokens);
  paged.write(start, length, table, position, slot);
  Batch batch{start.get(), length.get(),   table.get(), size_t(paged.most), paged.sequences,
              position.get(), slot.get(), paged.tokens};
  size_t state = net.matrix() + size_t(net.taps - 1) * net.channels(), heads = size_t(paged.tokens) * net.value_heads;
  Buffer<float> states(state * paged.blocks), mixed(size_t(paged.tokens) * net.channels());
  size_t kept = net.rule == DeltaRule::channel ? heads * net.key : heads;
  Buffer<float> decay(kept), beta(heads), out(heads * net.value);
  fill(conv), fill(states), fill_rows(mixed), fill(decay), fill(beta);
  delta(engine, net, {mixed.get(), decay.get(), beta.get(), out.get()}, {states.get(), state, paged.blocks, paged.block},
        batch);
  calls++;
}

// A half with states of every kind, in one call and in parts, and steps of rows.
template <class E>
void state_half(Engine& engine) {
  Paged paged;
  MixerKind kind = MixerKind(up_to(5) - 1);
  int hidden = up_to(130), count = 2 + up_to(30);
  DeltaNet net{up_to(3), 0, up_to(70), up_to(150), up_to(4), DeltaRule(int(kind) % 3)};
  net.value_heads = net.key_heads * up_to(3);
  if (kind >= MixerKind::convolution) net.value_heads = up_to(150), net.key_heads = net.key = 0, net.value = 1;
  int values = net.value_heads * net.value, decays = net.value_heads * (kind == MixerKind::channel ? net.key : 1);
  bool direct = random_bits() % 2;
  int ranks = up_to(40), rest = kind == MixerKind::head ? 2 * net.value_heads + values
                              : kind == MixerKind::sum  ? net.value_heads + values
                              : kind == MixerKind::convolution ? 2 * net.channels()
                                                               : net.value_heads + (direct ? decays + values : 2 * ranks);
  Buffer<float> conv(size_t(net.taps) * net.channels()), rate(decays), step(decays), behind(net.channels()), bias(count);
  Buffer<E> norm(hidden), value_norm(values);
  fill(conv), fill(rate), fill(step), fill(behind), fill(bias), fill(norm), fill(value_norm);
  net.conv = conv.get();
  auto map = [&](int outputs, int inputs) { return linear_map<E>(engine, outputs, inputs); };
  bool second = kind == MixerKind::channel && !direct;
  MixerWeights mixer{kind, net, map(net.channels() + rest, hidden), second ? map(decays, ranks) : nullptr, second ? map(values, ranks) : nullptr,
                     map(hidden, values), rate.get(), step.get(), random_bits() % 2 ? behind.get() : nullptr, value_norm.get(),
                     random_bits() % 2 ? -5.0f : 0.0f, 1};
  Rule rule{up_to(2), int(random_bits() % 3), 0, 1, 1, true, 1e-20f, 1.0f, 0.0f};
  StateHalf half({hidden, 1e-6f, norm.get(), norm.get(), mixer, map(count, hidden), bias.get(), rule});
  Buffer<int32_t> start(paged.sequences + 1), length(paged.sequences), table(size_t(paged.sequences) * paged.most);
  Buffer<int64_t> position(paged.tokens), slot(paged.tokens);
  paged.write(start, length, table, position, slot);
  Batch batch{start.get(), length.get(), table.get(), size_t(paged.most), paged.sequences, position.get(), slot.get(), paged.tokens};
  size_t state = net.matrix() + size_t(net.taps - 1) * net.channels(), tokens = paged.tokens;
  Buffer<float> states(state * paged.blocks + 1), weight(tokens * rule.top_k), gates(tokens * values);
  Buffer<E> x(tokens * hidden), normed(x.size()), opened(gates.size()), gate(gates.size());
  Buffer<int32_t> expert(tokens * rule.top_k);
  fill(states), fill_rows(x), fill_rows(opened), fill_rows(gate);
  half.run<E>(engine, {states.get(), state, paged.blocks, paged.block}, batch, {x.get(), normed.get(), expert.get(), weight.get()});
  open_rows(engine, opened.get(), paged.tokens, net.value_heads, net.value, gate.get(), values, true, Opening(random_bits() % 2));
  join_rows(engine, Gating{true, 1.0f, 1.0f, false, true}, opened.get(), paged.tokens, values, gate.get());
  Gating odd{true, 1.0f, 1.5f, bool(random_bits() % 2)};
  if (values % 2 == 0) join_rows(engine, odd, opened.get(), paged.tokens, values / 2, gate.get());
  centre_rows<E>(engine, x.get(), paged.tokens, hidden, norm.get(), norm.get(), 1e-6f, normed.get());
  for (size_t i = 0; i < expert.size(); i++)
    if (expert[i] < 0 || expert[i] >= count) abort();
  calls++;
}

// A thread that lends its core whenever it waits, for moments of many lengths, and is rung awake now and then.
class Lender {
 public:
  Lender() : words_(64), here_(flags(0, 1, 16), {bell(32)}, true), there_(flags(1, 0, 32), {bell(16)}, true) {
    here_.lend(bell(32), bell(16));
    there_.lend(bell(16), bell(32));
    waiter_ = std::thread([this] { wait(); });
  }
  ~Lender() {
    stop_ = true;
    waiter_.join();
  }
  LentCore core() { return LentCore(bell(16)); }
  void ring() { here_.post(0, ++sent_); }

 private:
  uintptr_t bell(int word) { return reinterpret_cast<uintptr_t>(words_.data() + word); }
  void wait() {
    uint32_t seen = 0;
    for (int turn = 0; !stop_; turn++)
      if (!there_.wait({0}, 1e-5 * (turn % 50)).empty()) there_.settle(0, seen = there_.value(0));
  }

  std::vector<Word> words_;  // flags at 0 and 1, the borrower's bell at 32, the lender's at 16
  std::vector<FlagBoard::Addresses> flags(int incoming, int outgoing, int peer) {
    return {{bell(incoming), bell(outgoing), bell(peer)}};
  }
  FlagBoard here_, there_;
  uint32_t sent_ = 0;
  std::atomic<bool> stop_{false};
  std::thread waiter_;
};

template <class E>
void round(Engine& engine) {
  linear<E>(engine);
  experts<E>(engine);
  layer<E>(engine);
  latent<E>(engine);
  latent_half<E>(engine);
  sums<E>(engine);
  state_half<E>(engine);
}

void every(Engine& engine, bool behind_pages) {
  guarded = behind_pages;
  round<float>(engine);
  round<bf16>(engine);
  gated_delta(engine);
}

// The same with guests, whose cores come and go, one behind another; last there is none.
void with_guests(Engine& engine, int guests, int rounds) {
  for (int i = guests; i > 0; i--) {
    Lender lender;
    engine.borrow(lender.core(), nullptr);
    for (int j = 0; j < rounds; j++) {
      lender.ring();
      every(engine, i % 2);
    }
    engine.borrow(LentCore(), nullptr);
  }
}

}  // namespace

int main(int count, char** arguments) {
  int rounds = count > 1 ? atoi(arguments[1]) : 10;
  long borrowed = 0;
  for (const char* name : {"amx", "avx512bf16fma", "avx512bf16", "avx512", "avx2", "generic"}) {
    if (!find_isa(name)) continue;
    for (int threads : {1, 3}) {
      Engine engine(threads, name);
      for (int i = 0; i < rounds; i++) every(engine, i % 2);
      long_rows<float>(engine);
      long_rows<bf16>(engine);
      with_guests(engine, std::min(rounds, 2), (rounds + 3) / 4);
      borrowed += long(engine.pool.borrowed());
    }
    printf("%s: ", name);
  }
  printf("%ld calls, %ld tasks on lent cores\n", calls, borrowed);
}
