#include "attention.h"

#include <atomic>
#include <stdexcept>

#include "attention_rows.h"
#include "attention_tiles.h"

namespace {

constexpr int LOT = 16;  // rows whose factors are made together

size_t merge_floats(int count, int columns) { return size_t(count) * LOT + columns; }

// Of rows first .. first + rows - 1 of so many splits: what each split's sums are multiplied by, 0 where a row saw none of
// its keys; and what the weights of all add up to, relative to e^top.
void factors(const Isa& isa, const Partial& split, size_t step, int count, int first, int rows, float* factor, float* top,
             float* total) {
  auto at = [&](int i) { return Partial{split.at + i * step, split.rows, split.columns}; };
  std::fill(top, top + LOT, -INFINITY);
  std::fill(total, total + LOT, 0.0f);
  std::fill(factor, factor + size_t(count) * LOT, 0.0f);
  for (int i = 0; i < count; i++)
    for (int r = 0; r < rows; r++) top[r] = std::max(top[r], at(i).top(first + r));
  for (int i = 0; i < count; i++)
    for (int r = 0; r < rows; r++) factor[i * LOT + r] = at(i).top(first + r) - top[r];
  isa.exp_all(factor, 0.0f, count * LOT);
  for (int i = 0; i < count; i++)
    for (int r = 0; r < rows; r++) {
      float part = at(i).total(first + r), &f = factor[i * LOT + r];
      f = part == 0.0f ? 0.0f : f;
      if (f != 0.0f) total[r] += part * f;
    }
}

// Splits of a task's rows into their results: the sums, each scaled to the highest score, over the weights' total.
template <class E>
void merge_splits(const Isa& isa, const Attention<E>& a, const Task& task, const Merge& merge, float* partials,
                  float* memory) {
  int columns = a.values.size, rows = task.tokens * (a.heads / a.groups);
  size_t floats = Partial::floats(rows, columns), step = floats * task.groups;
  Partial split{partials + task.partial + merge.group * floats, rows, columns};
  float *factor = memory, *row = memory + size_t(merge.count) * LOT, top[LOT], total[LOT];
  for (int first = 0; first < rows; first += LOT) {
    int some = std::min(LOT, rows - first);
    factors(isa, split, step, merge.count, first, some, factor, top, total);
    for (int i = 0; i < some; i++) {
      int r = first + i;
      float all = a.with_sink(total[i], head_of(a, task, merge.group, r), top[i]);
      isa.sum_scaled(row, split.sums(r), step, merge.count, factor + i, LOT, 1.0f / all, columns);
      E* out = out_row(a, task, merge.group, r);
      for (int c = 0; c < columns; c += PANEL)
        isa.of<E>().store(row + c, 1, nullptr, out + c, PANEL, std::min(PANEL, columns - c));
    }
  }
}

template <class Worker, class E>
void attend_with(Engine& engine, const Attention<E>& a, const Batch& batch) {
  const Isa& isa = *engine.isa;
  int share = a.heads / a.groups, columns = a.values.size;
  int together = heads_together(batch, a.groups, engine.pool.threads());
  Plan todo = plan(batch, a.groups, together, share, columns, a.window);
  if (todo.tasks.empty()) return;
  auto space = Worker::space(isa, a, todo.rows, together);
  size_t near = (space.bytes() + 63) / 64 * 64;
  int most = 0;
  for (const Merge& merge : todo.merges) most = std::max(most, merge.count);
  engine.reserve(near + merge_floats(most, columns) * sizeof(float));
  float* partials = most > 1 ? engine.shared[2].at_least<float>(todo.partials) : nullptr;
  std::vector<std::atomic<int>> left(todo.merges.size());  // of each merge, splits that are not done yet
  for (size_t i = 0; i < left.size(); i++) left[i].store(todo.merges[i].count, std::memory_order_relaxed);
  std::atomic<bool> bad{false};

  std::vector<Worker> workers;
  workers.reserve(engine.pool.threads());
  for (int i = 0; i < engine.pool.threads(); i++)
    workers.emplace_back(isa, a, batch, space.at(engine.scratch<char>(i)));
  std::vector<int> ends = runs(todo.tasks, engine.pool.threads());
  engine.pool.run_within(int(ends.size()), [&](int run, int thread) {
    for (int i = run ? ends[run - 1] : 0; i < ends[run]; i++) {
      const Task& task = todo.tasks[i];
      bool alone = todo.merges[task.merge].count == 1;
      if (!workers[thread].run(task, i + 1 < ends[run] ? &todo.tasks[i + 1] : nullptr, alone ? nullptr : partials)) bad = true;
      // Whoever ends the last split merges them: most lie in a near cache then.
      if (alone || left[task.merge].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      const Task& first = todo.tasks[todo.merges[task.merge].first];
      for (int g = 0; g < together; g++)
        merge_splits(isa, a, first, todo.merges[task.merge + g], partials, reinterpret_cast<float*>(engine.scratch<char>(thread) + near));
    }
  });
  if (bad) throw std::out_of_range("block_table_SB: a block id is not in 0 .. " + std::to_string(a.blocks - 1));
}

}  // namespace

template <class E>
void attend(Engine& engine, const Attention<E>& a, const Batch& batch) {
  if (!(a.scale > 0)) throw std::invalid_argument("scale: " + std::to_string(a.scale) + " is not above 0");
  // Rows of 8 bits become tiles, or are multiplied as they lie, where blocks and heads are whole ones; latents, whose keys are
  // values too, are only multiplied.
  bool sixteens = a.block_size % TILE_TOKENS == 0 && a.keys.size % 16 == 0 && a.values.size % 16 == 0;
  bool eight = a.keys.bits != Bits::whole && sixteens && !a.alone && (!a.latent() || TilesWorker<E>::takes_codes(*engine.isa, a));
  if (a.keys.layout == Layout::rows && !eight)
    attend_with<RowsWorker<E>>(engine, a, batch);
  else
    attend_with<TilesWorker<E>>(engine, a, batch);
}

template void attend(Engine&, const Attention<bf16>&, const Batch&);
template void attend(Engine&, const Attention<float>&, const Batch&);
