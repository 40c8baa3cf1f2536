#include "lent_core.h"

#include <climits>
#include <ctime>
#include <stdexcept>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

void wake(LentCore::Word& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// At most `ns`, while the word has this value.
void sleep_on(LentCore::Word& word, uint32_t value, int64_t ns) {
  timespec span{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &span, nullptr, 0);
#else
  (void)word, (void)value;
  nanosleep(&span, nullptr);
#endif
}

uint32_t this_cpu() {
#if defined(__linux__)
  int cpu = sched_getcpu();
  return cpu < 0 ? 0 : static_cast<uint32_t>(cpu);
#else
  return 0;
#endif
}

// The calling thread. Where it may not, it stays where it is.
void move_to(uint32_t cpu) {
#if defined(__linux__)
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  sched_setaffinity(0, sizeof only, &only);
#else
  (void)cpu;
#endif
}

}  // namespace

LentCore::LentCore(uintptr_t bell) : bell_(reinterpret_cast<Word*>(bell)) {
  if (bell == 0 || bell % sizeof(Word) != 0) throw std::invalid_argument("a core is lent at an aligned address");
}

void LentCore::lend(uint32_t count) const {
  asleep_at().store(count);
  cpu().store(this_cpu());
  state().store(FREE);
  if (waiting().load()) wake(state());
}

void LentCore::take_back() const { state().store(OWNER); }

bool LentCore::enter(int64_t ns, int& here) const {
  uint32_t free = FREE;
  if (!state().compare_exchange_strong(free, GUEST)) {
    waiting().store(1);
    uint32_t now = state().load();
    if (now != FREE) sleep_on(state(), now, ns);
    waiting().store(0);
    free = FREE;
    if (!state().compare_exchange_strong(free, GUEST)) return false;
  }
  auto there = static_cast<int>(cpu().load());
  if (there != here) move_to(there), here = there;
  return true;
}

void LentCore::leave() const {
  uint32_t mine = GUEST;
  if (state().compare_exchange_strong(mine, FREE) && bell_->load() != asleep_at().load()) wake(*bell_);
}

void LentCore::give_back() const {
  uint32_t mine = GUEST;
  if (state().compare_exchange_strong(mine, OWNER)) wake(*bell_);
}
