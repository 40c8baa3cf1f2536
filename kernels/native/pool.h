// A few threads that share the tasks of one op. They spin for a moment after an op, because the next one is
// usually near, then sleep. A pool of one thread is a plain loop. A guest is one more thread, which takes tasks while
// another node lends its core. Knows nothing of what the tasks do.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lent_core.h"

class Pool {
 public:
  using Hook = void (*)();

  // Every thread calls `enter` before its first task of a `run_within` and `leave` after its last.
  Pool(int threads, Hook enter, Hook leave);
  ~Pool();
  // With the guest.
  int threads() const { return threads_ + guests_; }
  // From now on a further thread computes on this core while it is lent, and on no other; none where there is no core.
  // Between two runs.
  void borrow(const LentCore& core);
  // Tasks that guests have done so far.
  int64_t borrowed() const { return borrowed_; }

  // task(index, worker) for every index below n, in any order; returns when all are done.
  template <class Task>
  void run(int n, const Task& task) {
    run(n, task, false);
  }

  // The same between `enter` and `leave`: for tasks that multiply.
  template <class Task>
  void run_within(int n, const Task& task) {
    run(n, task, true);
  }

 private:
  using Call = void (*)(const void*, int, int);

  template <class Task>
  void run(int n, const Task& task, bool within) {
    if (n > 1 && threads() > 1)
      return share(n, [](const void* t, int i, int worker) { (*static_cast<const Task*>(t))(i, worker); }, &task, within);
    if (within && n) enter_();
    for (int i = 0; i < n; i++) task(i, 0);
    if (within && n) leave_();
  }

  void share(int n, Call call, const void* task, bool within);
  void start();
  void work(int worker);
  void drain(uint64_t round, int worker, const LentCore* core = nullptr);
  void end_guest();
  void visit(const LentCore& core);
  void compute_on(const LentCore& core);
  bool sleep_until_round(uint64_t seen);
  bool has_task() const;
  bool wait_for_round(uint64_t seen);

  // `ticket_` is round << 32 | next index. A round is closed (index CLOSED) while the fields change, so a
  // late worker can never take a task of one round with the fields of another.
  static constexpr uint64_t CLOSED = 0x7fffffff;
  const int threads_;
  const Hook enter_, leave_;
  std::atomic<uint64_t> ticket_{CLOSED};
  std::atomic<int> count_{0}, done_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> task_{nullptr};
  std::atomic<bool> within_{false};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<bool> dozing_{false};  // the guest sleeps because there was nothing to share
  int guests_ = 0;
  std::atomic<int64_t> borrowed_{0};
  std::atomic<bool> ends_{false};  // the guest's life
  std::thread guest_;
};
