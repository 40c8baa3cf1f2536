// Where the tiles of a task lie, one after the other in the order of their addresses. Knows nothing of what is computed.
#pragma once
#include "attention_plan.h"

namespace {

constexpr int RUN = 16;  // blocks

// Where the sixteen tokens of the first key that any row of a task sees begin.
inline int first_tile(const Task& task, int window) {
  return std::max(task.first, lowest_key(task.position, window)) / TILE_TOKENS * TILE_TOKENS;
}

// Walks through the tiles of a task in the order of their addresses: of each sixteen tokens all heads' keys, then all
// heads' values; and then through those of the task after it.
template <class E>
class Cursor {
 public:
  Cursor(const Attention<E>& a, const Batch& batch) : a_(a), batch_(batch) {}

  const Task* task() const { return task_; }
  void follow_with(const Task* next) { next_ = next; }

  void go_to(const Task* task, int64_t before = -2) {
    task_ = task;
    next_ = nullptr;
    if (!task) return;
    position_ = first_tile(*task, a_.window);
    entry_ = batch_.table + task->sequence * batch_.table_stride + position_ / a_.block_size;
    inside_ = position_ % a_.block_size;
    look(before);
  }

  // The tiles of the first head at hand; null past the end, and where the table names no block.
  const E* keys() const { return task_ ? keys_ : nullptr; }
  const E* values() const { return values_; }

  // To the next sixteen tokens.
  void step() {
    int64_t before = *entry_;
    position_ += TILE_TOKENS;
    inside_ += TILE_TOKENS;
    if (position_ >= task_->last) return go_to(next_, before);
    if (inside_ >= a_.block_size) inside_ = 0, entry_++;
    look(before);
  }

  // The next tile; null past the end, where there is no block, and where all of a run is read if runs need no asking.
  const E* take(bool runs) {
    if (!keys()) return nullptr;
    const E* tile = past_ < task_->groups
                        ? a_.keys.past(keys_, past_ * a_.keys.group_stride)
                        : a_.values.past(values_, (past_ - task_->groups) * a_.values.group_stride);
    bool skipped = in_run_ && !runs && task_->groups == a_.groups;
    if (++past_ == (a_.latent() ? 1 : 2) * task_->groups) step();
    return skipped ? nullptr : tile;
  }

 private:
  void look(int64_t before) {
    int block = *entry_;
    past_ = 0;
    if (block != before && block != before + 1) in_run_ = begins_run();
    bool exists = block >= 0 && block < a_.blocks;
    keys_ = exists ? a_.keys.at(block, task_->group, inside_) : nullptr;
    values_ = exists ? a_.values.at(block, task_->group, inside_) : nullptr;
  }

  // Whether so many neighbouring blocks follow that a processor's prefetcher does better than we.
  bool begins_run() const {
    if ((task_->context - position_ + inside_) / a_.block_size < RUN) return false;
    for (int i = 1; i < RUN; i++)
      if (entry_[i] != int64_t(*entry_) + i) return false;
    return true;
  }

  const Attention<E>& a_;
  const Batch& batch_;
  const Task *task_ = nullptr, *next_ = nullptr;
  int position_ = 0, inside_ = 0;
  const int32_t* entry_ = nullptr;  // of the block table at `position_`, which is token `inside_` of that block
  const E *keys_ = nullptr, *values_ = nullptr;
  int past_ = 0;  // tiles taken of these sixteen tokens
  bool in_run_ = false;
};

}  // namespace
