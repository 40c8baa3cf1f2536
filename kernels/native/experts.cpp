#include "experts.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace {

constexpr int ROW_BLOCK = 128;
constexpr float NOTHING[PANEL] = {};

int clamp(int n, int most) { return n < most ? n : most; }

// Neighbouring panels of the second product that one task reads from each expert: memory comes faster in longer pieces. No
// more than leave each thread four tasks, and sums that stay in a near cache.
int panels_together(int panels, int rows, int threads) {
  constexpr int most = 8, near_rows = 256;
  int some = 1;
  while (some < most && 2 * some * rows <= near_rows && panels / (2 * some) >= 4 * threads) some *= 2;
  return some;
}

// Adds a panel's biases to rows of sums; nothing where there are none.
void add_bias(const Isa& isa, float* sum, int rows, const std::vector<float>& bias, size_t panel) {
  if (bias.empty()) return;
  for (int r = 0; r < rows; r++) isa.add_scaled(sum + r * PANEL, sum + r * PANEL, bias.data() + panel * PANEL, 1.0f, PANEL);
}

}  // namespace

void Grouping::build(const int32_t* slot, const float* by_choice, int rows, int choices, int slots) {
  start.assign(slots + 1, 0);
  int total = rows * choices;
  for (int i = 0; i < total; i++) {
    if (slot[i] >= slots)
      throw std::out_of_range("slot_RK: slot " + std::to_string(slot[i]) + " in row " + std::to_string(i / choices) +
                              ", there are " + std::to_string(slots) + " slots");
    if (slot[i] >= 0) start[slot[i] + 1]++;
  }
  groups.clear();
  for (int s = 0; s < slots; s++) {
    if (start[s + 1]) groups.push_back({s, start[s], start[s + 1]});
    start[s + 1] += start[s];
  }
  row.resize(start[slots]);
  weight.resize(start[slots]);
  for (int i = 0; i < total; i++) {
    if (slot[i] < 0) continue;
    int entry = start[slot[i]]++;
    row[entry] = i / choices;
    weight[entry] = by_choice[i];
  }
  mark(rows);
}

void Grouping::mark(int rows) {
  int entries = int(row.size());
  first.assign(entries, 0);
  last.assign(entries, 0);
  seen.assign(rows, -1);
  for (int e = 0; e < entries; e++) {
    first[e] = seen[row[e]] < 0;
    seen[row[e]] = e;
  }
  idle.clear();
  for (int r = 0; r < rows; r++) {
    if (seen[r] < 0)
      idle.push_back(r);
    else
      last[seen[r]] = 1;
  }
}

Experts::Experts(int slots, int hidden, int inner, Dtype dtype, const Groups& groups, bool bias, const Gating& gating,
                 int places)
    : slots_(slots),
      hidden_(hidden),
      inner_(inner),
      gating_(gating),
      gate_up_(slots, ceil_div(inner, width()) * PANEL, hidden, dtype, groups, places),
      down_(slots, hidden, inner, dtype, groups, places),
      gate_up_bias_(bias ? size_t(slots) * gate_up_.panels() * PANEL : 0),
      down_bias_(bias ? size_t(slots) * down_.panels() * PANEL : 0) {}

Experts::Experts(int slots, int hidden, int inner, GgmlType gate_up, GgmlType down, bool bias, const Gating& gating, int places)
    : slots_(slots),
      hidden_(hidden),
      inner_(inner),
      gating_(gating),
      gate_up_(slots, ceil_div(inner, width()) * PANEL, hidden, {gate_up}, places),
      down_(slots, hidden, inner, {down}, places),
      gate_up_bias_(bias ? size_t(slots) * gate_up_.panels() * PANEL : 0),
      down_bias_(bias ? size_t(slots) * down_.panels() * PANEL : 0) {}

void Experts::check(int slot) const {
  if (slot < 0 || slot >= slots_) throw std::out_of_range("slot " + std::to_string(slot) + " does not exist");
}

void Experts::put(int slot, int place) {
  check(slot);
  gate_up_.put(slot, place);
  down_.put(slot, place);
}

void Experts::check_placed() const {
  for (const auto& group : grouping_.groups)
    if (!gate_up_.placed(group.slot))
      throw std::out_of_range("slot " + std::to_string(group.slot) + " has no weights in memory");
}

// Panel columns are gate, up, gate, up tiles of 16, so that SwiGLU needs only what one product made; or, without gates, all
// up.
int Experts::gate_up_row(int column) const {
  if (gating_.squared) return column < inner_ ? column : -1;
  int inner = column / PANEL * 32 + column % PANEL / 32 * 16 + column % 16;
  if (inner >= inner_) return -1;
  return column / 16 % 2 ? inner_ + inner : inner;
}

void Experts::pack(int slot, const Source& gate_up, const Source& down) {
  check(slot);
  if (gate_up.data) gate_up_.pack(slot, gate_up, [this](int column) { return gate_up_row(column); });
  if (down.data) down_.pack(slot, down, [this](int column) { return down_row(column); });
}

void Experts::pack_int4(int slot, const Int4Source& gate_up, const Int4Source& down) {
  check(slot);
  gate_up_.pack_int4(slot, gate_up, [this](int column) { return gate_up_row(column); });
  down_.pack_int4(slot, down, [this](int column) { return down_row(column); });
}

void Experts::pack_fp8(int slot, const Fp8Source& gate_up, const Fp8Source& down) {
  check(slot);
  gate_up_.pack_fp8(slot, gate_up, [this](int column) { return gate_up_row(column); });
  down_.pack_fp8(slot, down, [this](int column) { return down_row(column); });
}

void Experts::pack_ggml(int slot, const void* gate_up, const void* down) {
  check(slot);
  gate_up_.pack_ggml(slot, gate_up, [this](int column) { return gate_up_row(column); });
  down_.pack_ggml(slot, down, [this](int column) { return down_row(column); });
}

void Experts::set_bias(int slot, const float* gate_up, const float* down) {
  check(slot);
  if (down_bias_.empty()) throw std::invalid_argument("slot " + std::to_string(slot) + " has no biases");
  auto place = [slot](std::vector<float>& bias, int panels, const float* from, auto row_of) {
    float* to = bias.data() + size_t(slot) * panels * PANEL;
    for (int c = 0; c < panels * PANEL; c++) to[c] = row_of(c) < 0 ? 0.0f : from[row_of(c)];
  };
  place(gate_up_bias_, gate_up_.panels(), gate_up, [this](int column) { return gate_up_row(column); });
  place(down_bias_, down_.panels(), down, [this](int column) { return down_row(column); });
}

template <class E, class O>
void Experts::run(Engine& engine, const E* x, size_t stride, const int32_t* slot, const float* weight, int rows,
                  int choices, O* out, size_t out_stride, bool add) {
  auto store = engine.isa->of<O>().store;
  compute(engine, x, stride, slot, weight, rows, choices, out, out_stride, add, [&](int r, int panel, const float* sum) {
    store(sum, 1, nullptr, out + panel * PANEL + r * out_stride, out_stride, clamp(hidden_ - panel * PANEL, PANEL));
  });
}

template <class E>
void Experts::add_to(Engine& engine, const E* normed, const int32_t* slot, const float* weight, int rows, int choices,
                     E* x, int32_t* bad, int layer) {
  size_t stride = hidden_;
  const Loops<E>& loops = engine.isa->of<E>();
  compute(engine, normed, stride, slot, weight, rows, choices, x, stride, false, [&](int r, int panel, const float* sum) {
    bool finite = loops.add_sums(x + r * stride + panel * PANEL, sum, clamp(hidden_ - panel * PANEL, PANEL));
    if (finite || !bad) return;
    int32_t none = __atomic_load_n(bad + r, __ATOMIC_RELAXED);  // other threads have other columns of the row
    if (none < 0) __atomic_store_n(bad + r, layer, __ATOMIC_RELAXED);
  });
}

template <class E, class O, class End>
void Experts::compute(Engine& engine, const E* x, size_t stride, const int32_t* slot, const float* weight, int rows,
                      int choices, O* out, size_t out_stride, bool add, const End& end) {
  const Isa& isa = *engine.isa;
  grouping_.build(slot, weight, rows, choices, slots_);
  check_placed();
  int together = panels_together(down_.panels(), rows, engine.pool.threads());
  size_t sums = size_t(ROW_BLOCK + rows * together) * PANEL * sizeof(float);
  bool by_bytes = gate_up_.multiplies_bytes<E>(isa);
  engine.reserve(sums + (by_bytes ? gate_up_.operand_bytes(ROW_BLOCK) : 0));
  const auto& groups = grouping_.groups;
  int entries = int(grouping_.row.size());
  size_t wide = size_t(gate_up_.blocks()) * BLOCK, inner = size_t(gate_up_.panels()) * width();

  // Each entry's activations, in group order and whole blocks; none where bytes are multiplied, which threads make as they
  // need them: what another core wrote comes slower than weights do.
  E* gathered = by_bytes ? nullptr : engine.shared[0].at_least<E>((entries + ROW_GROUP) * wide);
  engine.pool.run(by_bytes ? 0 : ceil_div(entries, 64), [&](int index, int) {
    for (int e = index * 64; e < clamp(entries, index * 64 + 64); e++) {
      memcpy(gathered + e * wide, x + grouping_.row[e] * stride, hidden_ * sizeof(E));
      memset(gathered + e * wide + hidden_, 0, (wide - hidden_) * sizeof(E));
    }
  });

  struct Piece {
    int slot, first, count;
  };
  std::vector<Piece> pieces;
  for (const auto& g : groups)
    for (int r = 0; r < g.count; r += ROW_BLOCK)
      pieces.push_back({g.slot, g.first + r, clamp(g.count - r, ROW_BLOCK)});
  auto next_piece = [&](size_t p) { return p + 1 < pieces.size() ? p + 1 : p; };
  E* middle = engine.shared[1].at_least<E>((entries + ROW_GROUP) * inner);
  Rows<E> joined{middle, inner, down_.bytes_in<E>(isa, entries, engine.shared[2])};
  int panels = gate_up_.panels();
  std::vector<std::atomic<int>> left(joined.bytes.data ? pieces.size() : 0);  // of each piece, panels that are not done yet
  for (auto& count : left) count.store(panels, std::memory_order_relaxed);
  std::vector<int> held(engine.pool.threads(), -1);  // of each thread, the piece whose bytes it has
  auto given = [&](int p, int worker) -> Rows<E> {
    const Piece& piece = pieces[p];
    if (!by_bytes) return {gathered + piece.first * wide, wide};
    Rows<E> made{x, stride, gate_up_.bytes_at(ROW_BLOCK, engine.scratch<char>(worker) + sums)};
    for (int i = 0; held[worker] != p && i < piece.count; i++)
      gate_up_.convert(isa, x + grouping_.row[piece.first + i] * stride, made.bytes, i);
    held[worker] = p;
    return made;
  };
  engine.pool.run_within(int(pieces.size()) * panels, [&](int index, int worker) {
    const Piece& piece = pieces[index / panels];
    int panel = index % panels;
    float* sum = engine.scratch<float>(worker);
    const char* after = panel + 1 < panels ? nullptr : gate_up_.at(pieces[next_piece(index / panels)].slot, 0);
    gate_up_.multiply(isa, piece.slot, panel, given(index / panels, worker), piece.count, sum, after);
    add_bias(isa, sum, piece.count, gate_up_bias_, size_t(piece.slot) * panels + panel);
    E* to = middle + piece.first * inner + panel * width();
    if (gating_.squared)
      isa.of<E>().squared_relu(sum, piece.count, to, inner);
    else if (gating_.gelu)
      isa.of<E>().geglu(sum, piece.count, to, inner);
    else if (gating_.clamped)
      isa.of<E>().clamped_swiglu(sum, piece.count, gating_, to, inner);
    else
      isa.of<E>().swiglu(sum, piece.count, to, inner);
    // Whoever ends a piece makes bytes of it: no round of threads for that.
    if (left.empty() || left[index / panels].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (int e = piece.first; e < piece.first + piece.count; e++) down_.convert(isa, middle + e * inner, joined.bytes, e);
  });

  // One task owns a few panels of 64 output columns of every row. With bf16 weights an expert's part is rounded to bf16, so that its
  // sum with the others' is the same on whichever nodes they are. A row leaves with its last part.
  auto add_part = sizeof(E) == sizeof(bf16) ? isa.add_rounded : isa.add_scaled;
  auto add_product = [&](size_t p, int panel, const char* after, float* sum, float* total) {
    const Piece& piece = pieces[p];
    int columns = clamp(hidden_ - panel * PANEL, PANEL);
    O* to = out + panel * PANEL;
    down_.multiply(isa, piece.slot, panel, joined.from(piece.first), piece.count, sum, after);
    add_bias(isa, sum, piece.count, down_bias_, size_t(piece.slot) * down_.panels() + panel);
    for (int i = 0; i < piece.count; i++) {
      int e = piece.first + i, r = grouping_.row[e], later = grouping_.row[std::min(e + 8, entries - 1)];
      for (size_t c = 0; c < PANEL * sizeof(O); c += 64)
        __builtin_prefetch(reinterpret_cast<char*>(to + later * out_stride) + c, 1);
      float* so_far = total + size_t(r) * PANEL;
      if (add && grouping_.first[e])
        for (int c = 0; c < columns; c++) so_far[c] = to_float(to[r * out_stride + c]);
      const float* base = add || !grouping_.first[e] ? so_far : NOTHING;
      add_part(so_far, base, sum + i * PANEL, grouping_.weight[e], PANEL);
      if (grouping_.last[e]) end(r, panel, so_far);
    }
  };
  engine.pool.run_within(ceil_div(down_.panels(), together), [&](int task, int worker) {
    int first = task * together, stop = clamp(down_.panels(), first + together);
    float* sum = engine.scratch<float>(worker);
    float* total = sum + ROW_BLOCK * PANEL;
    for (size_t p = 0; p < pieces.size(); p++)
      for (int panel = first; panel < stop; panel++) {
        const char* after = panel + 1 < stop ? nullptr : down_.at(pieces[next_piece(p)].slot, first);
        add_product(p, panel, after, sum, total + size_t(panel - first) * rows * PANEL);
      }
    for (int panel = first; !add && panel < stop; panel++)
      for (int r : grouping_.idle) end(r, panel, NOTHING);
  });
}

template void Experts::run(Engine&, const bf16*, size_t, const int32_t*, const float*, int, int, bf16*, size_t, bool);
template void Experts::run(Engine&, const bf16*, size_t, const int32_t*, const float*, int, int, float*, size_t, bool);
template void Experts::run(Engine&, const float*, size_t, const int32_t*, const float*, int, int, float*, size_t, bool);
template void Experts::add_to(Engine&, const bf16*, const int32_t*, const float*, int, int, bf16*, int32_t*, int);
template void Experts::add_to(Engine&, const float*, const int32_t*, const float*, int, int, float*, int32_t*, int);
