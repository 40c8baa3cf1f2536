#include "answer.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>

namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration span) { return std::chrono::duration<double>(span).count(); }

Clock::duration span(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

bool answers(const Answerable& which, size_t lane, const Header& header) {
  return header.rows && header.rows <= which.most_rows[lane] &&
         std::find(which.epochs.begin(), which.epochs.end(), header.epoch) != which.epochs.end();
}

}  // namespace

ExpertLayers::ExpertLayers(Engine& engine, std::vector<std::shared_ptr<Experts>> layers, Dtype rows, Dtype sums)
    : engine_(engine), layers_(std::move(layers)), rows_(rows), sums_(sums) {
  bool same = rows == sums && (rows == Dtype::f32 || rows == Dtype::bf16);
  if (!same && !(rows == Dtype::bf16 && sums == Dtype::f32))
    throw std::invalid_argument("sums of dtype code " + std::to_string(int(sums)) + " of rows of dtype code " +
                                std::to_string(int(rows)));
}

template <class E, class O>
void ExpertLayers::run(Experts& experts, const Task& task) const {
  size_t hidden = size_t(task.row_bytes) / sizeof(E);
  experts.run(engine_, reinterpret_cast<const E*>(task.x), hidden, task.slot, task.weight, int(task.rows),
              int(task.choices), reinterpret_cast<O*>(task.out), hidden, false);
}

void ExpertLayers::compute(size_t layer, const Task& task) const {
  Experts& experts = *layers_.at(layer);
  if (rows_ == Dtype::f32) return run<float, float>(experts, task);
  if (sums_ == Dtype::f32) return run<bf16, float>(experts, task);
  run<bf16, bf16>(experts, task);
}

Answered answer(FlagBoard& board, const ExpertLayers& experts, const Answerable& which, double wait, double serve) {
  std::vector<size_t> lanes(which.most_rows.size());
  std::iota(lanes.begin(), lanes.end(), size_t{0});
  auto until = Clock::now() + span(wait);
  Answered done;
  while (true) {
    double left = seconds(until - Clock::now());
    std::vector<size_t> found = left > 0 ? board.wait(lanes, left) : std::vector<size_t>();
    if (found.size() != 1 || (done.messages && found[0] != done.lane)) return done;
    Taken taken = board.look(found[0]);
    if (!taken.good || !answers(which, found[0], taken.header)) return done;
    Task task = board.begin(found[0], taken);
    auto begin = Clock::now();
    experts.compute(taken.header.layer, task);
    auto end = Clock::now();
    board.post(found[0], taken.number);
    if (!done.messages++) until = std::min(until, end + span(serve));
    done.lane = found[0];
    done.rows += task.rows;
    done.seconds += done.last_seconds = seconds(end - begin);
    done.last = taken.header;
  }
}
