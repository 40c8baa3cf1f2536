#include "attention.h"

#include <atomic>
#include <stdexcept>

#include "attention_rows.h"
#include "attention_tiles.h"

namespace {

// Splits of one row into its result: the sums, each scaled to the highest score, over the weights' total.
template <class E>
void merge_row(const Isa& isa, const Attention<E>& a, int head, const float* partials, size_t step, int count, float* row,
               E* out) {
  constexpr int together = 16;  // factors that take the time of one
  int columns = a.values.size;
  float top = -INFINITY, total = 0, factor[together];
  for (int i = 0; i < count; i++) top = std::max(top, partials[i * step]);
  std::fill(row, row + columns, 0.0f);
  for (int first = 0; first < count; first += together) {
    for (int i = 0; i < together; i++) factor[i] = first + i < count ? partials[(first + i) * step] : top;
    isa.exp_all(factor, top, together);
    for (int i = first; i < std::min(count, first + together); i++) {
      const float* part = partials + i * step;
      if (part[1] == 0.0f) continue;
      total += part[1] * factor[i - first];
      isa.add_scaled(row, row, part + 2, factor[i - first], columns);
    }
  }
  isa.scale_row(row, 1.0f / a.with_sink(total, head, top), columns);
  for (int c = 0; c < columns; c += PANEL)
    isa.of<E>().store(row + c, 1, nullptr, out + c, PANEL, std::min(PANEL, columns - c));
}

template <class Worker, class E>
void attend_with(Engine& engine, const Attention<E>& a, const Batch& batch) {
  const Isa& isa = *engine.isa;
  int share = a.heads / a.groups, columns = a.values.size;
  int together = heads_together(batch, a.groups, engine.pool.threads());
  Plan todo = plan(batch, a.groups, together, share, columns, a.window);
  if (todo.tasks.empty()) return;
  auto space = Worker::space(isa, a, todo.rows, together);
  engine.reserve(space.bytes());
  bool split = todo.tasks.size() * together != todo.merges.size();
  float* partials = split ? engine.shared[2].at_least<float>(todo.partials) : nullptr;
  std::atomic<bool> bad{false};

  std::vector<Worker> workers;
  workers.reserve(engine.pool.threads());
  for (int i = 0; i < engine.pool.threads(); i++)
    workers.emplace_back(isa, a, batch, space.at(engine.scratch<char>(i)));
  std::vector<bool> alone(todo.tasks.size());
  for (const Merge& merge : todo.merges) alone[merge.first] = merge.count == 1;
  std::vector<int> ends = runs(todo.tasks, engine.pool.threads());
  engine.pool.run_within(int(ends.size()), [&](int run, int thread) {
    for (int i = run ? ends[run - 1] : 0; i < ends[run]; i++)
      if (!workers[thread].run(todo.tasks[i], i + 1 < ends[run] ? &todo.tasks[i + 1] : nullptr, alone[i] ? nullptr : partials))
        bad = true;
  });
  if (bad) throw std::out_of_range("block_table_SB: a block id is not in 0 .. " + std::to_string(a.blocks - 1));
  if (!split) return;

  engine.pool.run(int(todo.merges.size()), [&](int index, int thread) {
    const Merge& merge = todo.merges[index];
    if (merge.count == 1) return;
    const Task& task = todo.tasks[merge.first];
    size_t width = columns + 2, rows = size_t(task.tokens) * share;
    for (size_t r = 0; r < rows; r++)
      merge_row(isa, a, head_of(a, task, merge.group, int(r)), partials + task.partial + (merge.group * rows + r) * width,
                rows * task.groups * width, merge.count, engine.scratch<float>(thread),
                out_row(a, task, merge.group, int(r)));
  });
}

}  // namespace

template <class E>
void attend(Engine& engine, const Attention<E>& a, const Batch& batch) {
  if (!(a.scale > 0)) throw std::invalid_argument("scale: " + std::to_string(a.scale) + " is not above 0");
  if (a.keys.layout == Layout::rows)
    attend_with<RowsWorker<E>>(engine, a, batch);
  else
    attend_with<TilesWorker<E>>(engine, a, batch);
}

template void attend(Engine&, const Attention<bf16>&, const Batch&);
template void attend(Engine&, const Attention<float>&, const Batch&);
