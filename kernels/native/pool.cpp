#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr auto SPIN = std::chrono::microseconds(300);  // longer than the gap between two steps

constexpr int64_t PATIENCE = 10000000;                 // ns that the guest waits for the core before it asks itself why

// Pauses for some microseconds, then offers the core to whoever else wants it: where cores are shared, the thread
// that is waited for may be the one that wants it.
class Wait {
 public:
  void once() {
#if defined(__x86_64__)
    if (pauses_++ < 256) return _mm_pause();
#endif
    std::this_thread::yield();
  }

 private:
  int pauses_ = 0;
};

}  // namespace

Pool::Pool(int threads, Hook enter, Hook leave) : threads_(threads < 1 ? 1 : threads), enter_(enter), leave_(leave) {}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  end_guest();
}

void Pool::start() {
  for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { work(i); });
}

void Pool::share(int n, Call call, const void* task, bool within) {
  if (workers_.empty() && threads_ > 1) start();
  uint64_t round = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  // In this order: who sees a field of this round finds the round before closed when it takes a task.
  constexpr auto release = std::memory_order_release;
  ticket_.store(round << 32 | CLOSED, release);
  count_.store(n, release);
  done_.store(0, release);
  call_.store(call, release);
  task_.store(task, release);
  within_.store(within, release);
  ticket_ = round << 32;  // in one order with `sleepers_`: who falls asleep sees this, or is seen
  if (sleepers_ || dozing_) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  drain(round, 0);
  Wait wait;
  while (done_.load(std::memory_order_acquire) != n) wait.once();
}

void Pool::drain(uint64_t round, int worker, const LentCore* core) {
  bool entered = false;
  while (!core || !core->is_called()) {
    uint64_t ticket = ticket_;
    uint64_t index = ticket & 0xffffffff;
    int n = count_;
    Call call = call_;
    const void* task = task_;
    bool within = within_;
    if (ticket >> 32 != round || index >= static_cast<uint64_t>(n)) break;
    // Neighbours to one thread, since what they read lies side by side; fewer towards the end, so that all end together.
    int some = (n - static_cast<int>(index)) / (2 * threads());
    if (some < 1) some = 1;
    if (!ticket_.compare_exchange_weak(ticket, ticket + some)) continue;
    if (within && !entered) enter_(), entered = true;
    for (int i = 0; i < some; i++) call(task, static_cast<int>(index) + i, worker);
    if (core) borrowed_ += some;
    done_.fetch_add(some, std::memory_order_release);
  }
  if (entered) leave_();
}

bool Pool::wait_for_round(uint64_t seen) {
  auto open = [&] {
    uint64_t ticket = ticket_;
    return stop_ || (ticket >> 32 != seen && (ticket & 0xffffffff) != CLOSED);
  };
  auto until = std::chrono::steady_clock::now() + SPIN;
  Wait wait;
  do {
    for (int i = 0; i < 32; i++) {
      if (open()) return !stop_;
      wait.once();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_++;
  wake_.wait(lock, open);
  sleepers_--;
  return !stop_;
}

void Pool::work(int worker) {
  uint64_t seen = 0;
  while (wait_for_round(seen)) {
    seen = ticket_ >> 32;
    drain(seen, worker);
  }
}

void Pool::borrow(const LentCore& core) {
  end_guest();
  guests_ = core ? 1 : 0;
  if (core) guest_ = std::thread([this, core] { visit(core); });
}

void Pool::end_guest() {
  if (!guest_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  guest_.join();
  ends_ = false;
}

bool Pool::has_task() const {
  uint64_t index = ticket_ & 0xffffffff;
  return index != CLOSED && index < static_cast<uint64_t>(count_.load());
}

// False when the guest is to end.
bool Pool::sleep_until_round(uint64_t seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  dozing_ = true;
  wake_.wait(lock, [&] { return ends_ || ticket_ >> 32 != seen; });
  dozing_ = false;
  return !ends_;
}

void Pool::visit(const LentCore& core) {
  int cpu = -1;
  uint64_t seen = 0;
  while (sleep_until_round(seen)) {
    do {
      seen = ticket_ >> 32;
      if (core.enter(PATIENCE, cpu)) compute_on(core);
    } while (!ends_ && ticket_ >> 32 != seen);
  }
}

// Until its owner wants it or there was nothing to share for a while.
void Pool::compute_on(const LentCore& core) {
  auto until = std::chrono::steady_clock::now() + SPIN;
  Wait wait;
  do {
    for (int i = 0; i < 32; i++) {
      if (core.is_called()) return core.give_back();
      if (has_task()) {
        drain(ticket_ >> 32, threads_, &core);
        until = std::chrono::steady_clock::now() + SPIN;
        wait = Wait();
      }
      wait.once();
    }
  } while (!ends_ && std::chrono::steady_clock::now() < until);
  core.leave();
}
