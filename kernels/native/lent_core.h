// The core of a node that waits, lent to a thread of another node on the same host.
//
// Each node has a line of memory that both map: a bell (a count and its sleepers, see flags.h) and, behind it, the words
// of this loan. The owner sleeps on its bell; the guest spins on its core, computes tasks of its own process there, and
// wakes the owner when the bell has rung. Whoever rings may then leave the wake-up to the guest, which is on the right
// core already: a switch of threads in place of an interrupt. Only one guest knows a core.
//
// Knows neither messages nor tasks.
#pragma once
#include <atomic>
#include <cstdint>

class LentCore {
 public:
  using Word = std::atomic<uint32_t>;
  static constexpr int kBytes = 32;  // from the bell on: what a line must have room for

  LentCore() = default;
  // `bell` is the address of the owner's bell.
  explicit LentCore(uintptr_t bell);
  explicit operator bool() const { return bell_ != nullptr; }

  // The owner: it is about to sleep while its bell still has `count`.
  void lend(uint32_t count) const;
  void take_back() const;
  // Whether a guest has something to compute and waits for this core.
  bool is_wanted() const { return waiting().load() != 0; }

  // Whoever rang: true when the guest will wake the owner.
  bool guest_wakes() const { return state().load() == GUEST; }

  // The guest: waits for the core, at most `ns`, and goes there. False when it was not lent.
  bool enter(int64_t ns, int& cpu) const;
  // Whether the owner's bell has rung, or the owner has taken its core back.
  bool is_called() const { return state().load(std::memory_order_acquire) != GUEST || bell_->load() != asleep_at().load(); }
  // The guest has nothing to do: the core stays lent.
  void leave() const;
  // The guest goes because it was called: the owner's turn.
  void give_back() const;

 private:
  enum State : uint32_t { OWNER, FREE, GUEST };
  Word& at(int index) const { return bell_[index]; }
  Word& state() const { return at(4); }
  Word& cpu() const { return at(5); }
  Word& asleep_at() const { return at(6); }  // the bell's count when its owner lent the core
  Word& waiting() const { return at(7); }    // 1 while the guest sleeps until the core is lent

  Word* bell_ = nullptr;
};
