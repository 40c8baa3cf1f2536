// Runs saved cases (cases.h) with every instruction set that this processor has, and compares. Prints the sets and how many
// results were right; ends with 1, and a line for each that was not.
#include <math.h>

#include <exception>
#include <functional>
#include <memory>

#include "attention.h"
#include "block_order.h"
#include "cases.h"
#include "delta.h"
#include "experts.h"
#include "linear.h"
#include "router.h"
#include "rows.h"
#include "xxh3.h"

namespace {

int right = 0, wrong = 0;

void note(bool good, const Case& c, const Engine& engine, const std::string& what) {
  good ? right++ : wrong++;
  if (!good) printf("%s, %s: %s\n", engine.isa->name, c.op.c_str(), what.c_str());
}

// Results against `want`, as closely as `bounds` says: an absolute part and one of what is wanted. NaN is NaN only. Where a set
// multiplies rows in bytes, what comes of these is wanted.
template <class E>
void compare(const Case& c, const Engine& engine, const E* got, const char* name = "want") {
  if (c.has("want_in_bytes") && !strcmp(engine.isa->name, "neon")) name = "want_in_bytes";
  const Tensor& want = c[name];
  const float *wanted = want.as<float>(), *bounds = c.data<float>("bounds");
  float worst = 0;
  size_t at = 0, count = want.count();
  for (size_t i = 0; i < count; i++) {
    float g = to_float(got[i]), w = wanted[i], apart = fabsf(g - w) / (bounds[0] + bounds[1] * fabsf(w));
    if (g == w || (isnan(g) && isnan(w))) apart = 0;
    if (!(apart <= worst)) worst = isnan(apart) ? INFINITY : apart, at = i;
  }
  char text[160];
  snprintf(text, sizeof text, "%s of %zu: %g times the bound at %zu, %g for %g", name, count, double(worst), at,
           count ? double(to_float(got[at])) : 0.0, count ? double(wanted[at]) : 0.0);
  note(worst <= 1, c, engine, text);
}

template <class T>
void same(const Case& c, const Engine& engine, const T* got, const char* name) {
  note(!memcmp(got, c.data<T>(name), c[name].count() * sizeof(T)), c, engine, std::string(name) + " differs");
}

Dtype kept_as(const Case& c) { return static_cast<Dtype>(c.number("kept", c["x"].code)); }
Groups groups_of(const Case& c) { return {c.number("group"), bool(c.number("wide")), bool(c.number("e2m1"))}; }

Source part(const Case& c, const char* name, int index) {
  const Tensor& t = c[name];
  size_t columns = size_t(t.sizes.back()), rows = size_t(t.sizes[t.sizes.size() - 2]);
  return {t.memory.data() + index * rows * columns * (t.code ? 2 : 4), static_cast<Dtype>(t.code), columns};
}

// Codes of one of several matrices, and scales of its groups.
Int4Source codes_of(const Case& c, const char* codes, const char* scales, int index) {
  const Tensor &code = c[codes], &scale = c[scales];
  size_t rows = size_t(code.sizes[1]);
  return {code.as<int8_t>() + index * rows * code.sizes[2], scale.as<float>() + index * rows * scale.sizes[2]};
}

// Codes of one of several matrices in FP8, and scales of its blocks; rows from `second` on begin new ones.
Fp8Source fp8_of(const Case& c, const char* codes, const char* scales, int index, int second) {
  const Tensor &code = c[codes], &scale = c[scales];
  return {code.as<uint8_t>() + size_t(index) * code.sizes[1] * code.sizes[2],
          scale.as<float>() + size_t(index) * scale.sizes[1] * scale.sizes[2], second};
}

// A row alone has the bits that it has among others.
template <class E>
void linear(const Case& c, Engine& engine) {
  const Tensor &x = c["x"], &w = c["w"];
  int rows = x.size(0), inputs = x.size(1), outputs = w.size(1);
  Linear map = c.has("ggml") ? Linear(outputs, inputs, {static_cast<GgmlType>(c.number("ggml"))})
                             : Linear(outputs, inputs, kept_as(c), c.has("group") ? groups_of(c) : Groups{});
  if (c.has("ggml")) map.pack_ggml(w.memory.data(), 0, outputs);
  else c.has("group") ? map.pack_int4(codes_of(c, "w", "scale", 0)) : map.pack(part(c, "w", 0));
  if (c.has("bias")) map.set_bias({c["bias"].memory.data(), Dtype::f32, 0});
  std::vector<float> out(size_t(rows) * outputs + 1), some(out.size());
  map.run(engine, x.as<E>(), inputs, rows, out.data(), outputs);
  compare(c, engine, out.data());
  for (int n : {1, 2, 3, 4, 5, 7, 17}) {
    if (n > rows) break;
    const E* last = x.as<E>() + size_t(rows - n) * inputs;
    map.run(engine, last, inputs, n, some.data(), outputs);
    bool alike = !memcmp(some.data(), out.data() + size_t(rows - n) * outputs, size_t(n) * outputs * sizeof(float));
    note(alike, c, engine, "the last " + std::to_string(n) + " rows have other bits alone");
  }
}

template <class E>
void heads(const Case& c, Engine& engine) {
  const Tensor &x = c["x"], &w = c["w"];
  int tokens = x.size(0), count = x.size(1), inputs = x.size(2), outputs = w.size(1);
  HeadLinear map(count, outputs, inputs, kept_as(c), c.has("group") ? groups_of(c) : Groups{});
  for (int h = 0; h < count; h++) c.has("group") ? map.pack_int4(h, codes_of(c, "w", "scale", h)) : map.pack(h, part(c, "w", h));
  std::vector<E> out(size_t(tokens) * count * outputs + 1);
  map.run(engine, x.as<E>(), size_t(count) * inputs, inputs, tokens, out.data(), size_t(count) * outputs, outputs);
  compare(c, engine, out.data());
}

template <class E>
void experts(const Case& c, Engine& engine) {
  const Tensor &x = c["x"], &down = c["down"], &slot = c["slot"];
  int slots = down.size(0), hidden = down.size(1), inner = down.size(2), rows = x.size(0);
  Gating gating;
  if (c.has("limit")) gating = {true, c.real("limit"), c.real("alpha")};
  gating.gelu = c.has("gelu");
  Experts bank(slots, hidden, inner, kept_as(c), c.has("group") ? groups_of(c) : Groups{}, c.has("up_bias"), gating);
  for (int s = 0; s < slots; s++) {
    if (c.has("group"))
      bank.pack_int4(s, codes_of(c, "up", "up_scale", s), codes_of(c, "down", "down_scale", s));
    else if (c.has("up_scale"))
      bank.pack_fp8(s, fp8_of(c, "up", "up_scale", s, inner), fp8_of(c, "down", "down_scale", s, hidden));
    else
      bank.pack(s, part(c, "up", s), part(c, "down", s));
    if (c.has("up_bias")) bank.set_bias(s, c.data<float>("up_bias") + s * 2 * inner, c.data<float>("down_bias") + s * hidden);
  }
  std::vector<float> out(size_t(rows) * hidden + 1), one(hidden);
  const float* weight = c.data<float>("weight");
  int choices = slot.size(1);
  bank.run(engine, x.as<E>(), hidden, slot.as<int32_t>(), weight, rows, choices, out.data(), hidden, false);
  compare(c, engine, out.data());
  for (int r : {0, rows - 1}) {
    bank.run(engine, x.as<E>() + r * hidden, hidden, slot.as<int32_t>() + r * choices, weight + r * choices, 1, choices,
             one.data(), hidden, false);
    note(!memcmp(one.data(), out.data() + r * hidden, hidden * sizeof(float)), c, engine, "a row has other bits alone");
  }
}

template <class E>
void norms(const Case& c, Engine& engine) {
  int rows = c["x"].size(0), size = c["x"].size(1);
  std::vector<E> out(c["x"].count() + 1), x(c.data<E>("x"), c.data<E>("x") + c["x"].count());
  if (c.has("y"))
    add_rms_norm(engine, x.data(), c.data<E>("y"), rows, size, c.data<E>("weight"), c.real("eps"), out.data());
  else
    rms_norm(engine, x.data(), size, rows, size, c.data<E>("weight"), c.real("eps"), out.data());
  compare(c, engine, out.data());
  if (c.has("y")) same(c, engine, x.data(), "sums");
}

template <class E>
void sums(const Case& c, Engine& engine) {
  int rows = c["x"].size(0), size = c["x"].size(1);
  std::vector<E> x(c.data<E>("x"), c.data<E>("x") + c["x"].count());
  std::vector<int32_t> bad(rows, -1);
  add_sums(engine, x.data(), c.data<float>("y"), rows, size, bad.data(), 3);
  compare(c, engine, x.data());
  same(c, engine, bad.data(), "bad");
}

template <class E>
void turned(const Case& c, Engine& engine) {
  const Tensor& x = c["x"];
  std::vector<E> out(x.count());
  Turn turn{c.data<float>("cos"), c.data<float>("sin"), c.data<int64_t>("position"), c["cos"].size(0), c["cos"].size(1),
            bool(c.number("interleaved"))};
  rope(engine, x.as<E>(), size_t(x.size(1)) * x.size(2), x.size(2), x.size(0), x.size(1), turn, out.data());
  compare(c, engine, out.data());
}

template <class E>
void joined(const Case& c, Engine& engine) {
  const Tensor& x = c["x"];
  std::vector<E> out(x.count() / 2);
  gated(engine, x.as<E>(), x.size(0), x.size(1) / 2, out.data());
  compare(c, engine, out.data());
}

void highest(const Case& c, Engine& engine) {
  std::vector<int32_t> index(c["x"].size(0));
  argmax(engine, c.data<float>("x"), c["x"].size(0), c["x"].size(1), index.data());
  same(c, engine, index.data(), "index");
}

template <class E>
void route(const Case& c, Engine& engine) {
  const Tensor &x = c["x"], &gate = c["gate"];
  int tokens = x.size(0), hidden = x.size(1), count = gate.size(0);
  const int32_t* n = c.data<int32_t>("rule");
  const float* f = c.data<float>("factors");
  Rule rule{n[0], n[1], n[2], n[3], n[4], bool(n[5]), f[0], f[1], f[2]};
  std::vector<float> logits(size_t(tokens) * count), weight(size_t(tokens) * rule.top_k);
  std::vector<int32_t> expert(weight.size());
  if (gate.code == x.code)
    router_logits(engine, x.as<E>(), hidden, tokens, gate.as<E>(), count, hidden, logits.data());
  else
    router_logits_widened(engine, x.as<E>(), hidden, tokens, gate.as<float>(), count, hidden, logits.data());
  choose(engine, logits.data(), tokens, count, c.data<float>("bias"), rule, expert.data(), weight.data());
  same(c, engine, expert.data(), "expert");
  compare(c, engine, weight.data());
}

Batch batch_of(const Case& c) {
  return {c.data<int32_t>("start"), c.data<int32_t>("context"), c.data<int32_t>("table"), size_t(c["table"].size(1)),
          c["context"].size(0), c.data<int64_t>("position"), c.data<int64_t>("slot"), c["position"].size(0)};
}

// Every key and value that is seen is written first, so the cache's order is the library's own.
template <class E>
void attention(const Case& c, Engine& engine) {
  const Tensor &q = c["q"], &k = c["k"], &v = c["v"];
  int heads = q.size(1), size = q.size(2), groups = k.size(1), columns = v.size(2), block = c.number("block"), blocks = c.number("blocks");
  bool tiles = c.number("tiles"), one = c.number("latent");
  Bits bits = static_cast<Bits>(c.number("bits"));
  int wide = size + (bits == Bits::whole ? 0 : SCALE_BYTES);  // of a key
  size_t item = bits == Bits::whole ? sizeof(E) : 1, slots = size_t(blocks) * groups * block;
  auto strides = [&](int row) { return std::array<size_t, 3>{size_t(groups) * block * row, size_t(block) * row, size_t(row)}; };
  std::vector<char> key_bytes(slots * wide * item, '\xff'), value_bytes(one ? 0 : slots * columns * item, '\xff');
  E *keys = reinterpret_cast<E*>(key_bytes.data()), *values = reinterpret_cast<E*>(value_bytes.data());
  auto [kb, kg, kt] = strides(wide);
  auto [vb, vg, vt] = strides(one ? wide : columns);
  Layout key_layout = tiles ? Layout::key_tiles : Layout::rows, value_layout = tiles ? Layout::value_tiles : Layout::rows;
  const int64_t* places = c.data<int64_t>("places");
  Store<E> to_keys{keys, kb, kg, kt, groups, size, blocks, block, key_layout, bits};
  Store<E> to_values{values, vb, vg, vt, groups, columns, blocks, block, value_layout, bits};
  one ? write_latents(k.as<E>(), k.size(0), places, to_keys, columns)
      : write_pairs(k.as<E>(), v.as<E>(), k.size(0), places, to_keys, to_values);
  std::vector<E> out(size_t(q.size(0)) * heads * columns + 1);
  Attention<E> a{q.as<E>(), size_t(heads) * size, size_t(size), heads, groups, {keys, kb, kg, kt, size, key_layout, bits},
                 {one ? keys : values, vb, vg, vt, columns, value_layout, bits}, blocks, block, c.real("scale"),
                 c.number("window"), out.data(), c.data<float>("sinks")};
  attend(engine, a, batch_of(c));
  compare(c, engine, out.data());
}

void gated_delta(const Case& c, Engine& engine) {
  const int32_t* n = c.data<int32_t>("sizes");
  DeltaNet net{n[0], n[1], n[2], n[3], n[4], DeltaRule::head, c.data<float>("conv"), nullptr, nullptr};
  const Tensor &states = c["states"], &mixed = c["mixed"];
  std::vector<float> out(size_t(mixed.size(0)) * net.value_heads * net.value), left(states.as<float>(), states.as<float>() + states.count());
  delta(engine, net, {mixed.as<float>(), c.data<float>("decay"), c.data<float>("beta"), out.data()},
        {left.data(), states.count() / states.size(0), states.size(0), c.number("block")}, batch_of(c));
  compare(c, engine, out.data());
  compare(c, engine, left.data(), "left");
}

// The checksum of some bytes, whole and while they are copied in steps.
void hashed(const Case& c, Engine& engine) {
  const Tensor& x = c["x"];
  uint64_t wanted = uint64_t(c.data<int64_t>("sum")[0]), seed = uint64_t(c.data<int64_t>("seed")[0]);
  note(xxh3(x.memory.data(), x.count(), seed) == wanted, c, engine, "the checksum differs");
  std::vector<char> copy(x.count());
  Xxh3 in_steps(seed, x.count());
  for (size_t there = 0; there < x.count();) {
    there = std::min(x.count(), there + 2 * Xxh3::kBlock);
    if (there % Xxh3::kBlock == 0) in_steps.copy(x.memory.data(), copy.data(), there);
  }
  note(in_steps.end(x.memory.data()) == wanted, c, engine, "the checksum in steps differs");
}

// A block of a cache to bytes outside and back.
void moved(const Case& c, Engine& engine) {
  const Tensor &inside = c["inside"], &outside = c["outside"];
  std::vector<char> bytes(outside.count()), back(inside.count());
  Part part{back.data(), inside.count(), inside.count(), static_cast<Layout>(c.number("layout")), c.number("size"), c.number("item")};
  for (size_t at = 0; at < part.bytes; at += unit_of(part)) {
    size_t some = std::min(unit_of(part), part.bytes - at);
    move_out(part, inside.memory.data() + at, bytes.data() + at, some);
    move_in(part, outside.memory.data() + at, back.data() + at, some);
  }
  same(c, engine, bytes.data(), "outside");
  same(c, engine, back.data(), "inside");
}

using Run = void (*)(const Case&, Engine&);
struct Op {
  Run wide, narrow;  // of rows in float32, in bfloat16
};

const std::map<std::string, Op> ops = {
    {"linear", {linear<float>, linear<bf16>}},    {"heads", {heads<float>, heads<bf16>}},
    {"experts", {experts<float>, experts<bf16>}}, {"norms", {norms<float>, norms<bf16>}},
    {"sums", {sums<float>, sums<bf16>}},          {"rope", {turned<float>, turned<bf16>}},
    {"gated", {joined<float>, joined<bf16>}},     {"argmax", {highest, highest}},
    {"route", {route<float>, route<bf16>}},       {"attention", {attention<float>, attention<bf16>}},
    {"delta", {gated_delta, gated_delta}},        {"hash", {hashed, hashed}},
    {"moved", {moved, moved}},
};

}  // namespace

// run_cases FILE ISA...: those of the sets that run here.
int main(int count, char** given) {
  if (count < 3) return 2;
  try {
    std::vector<Case> cases = CaseFile(given[1]).all();
    for (int i = 2; i < count; i++) {
      if (!find_isa(given[i])) continue;
      printf("set %s\n", given[i]);
      Engine engine(2, given[i]);
      for (const Case& c : cases) {
        const Op& op = ops.at(c.op);
        (c.number("narrow") ? op.narrow : op.wide)(c, engine);
      }
    }
  } catch (const std::exception& error) {
    printf("%s\n", error.what());
    return 1;
  }
  printf("%d right, %d wrong\n", right, wrong);
  return wrong > 0;
}
