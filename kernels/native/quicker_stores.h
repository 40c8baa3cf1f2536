// Which way blocks go quicker to where another core reads them: through the caches or past them. On one AMD machine it
// may be either, by the cores that the two processes run on at the time. Cores that share a cache hand lines over at
// once; between others a line comes slower than from memory. So what blocks cost is told, and now and then the other
// way is tried for a while: its first blocks find caches as the way before has left them. It knows no blocks and no
// clock.
#pragma once
#include <stddef.h>

#include <algorithm>

class QuickerStores {
 public:
  // Whether the next block is to go past the caches.
  bool past() const { return past_; }

  // A block went there and cost so much per byte, in any unit.
  void took(bool past, size_t bytes, double cost) {
    if (past != past_) return;  // decided meanwhile, for another thread's block
    since_ += bytes;
    if (trying_) return tried(bytes, cost);
    double& known = cost_[past];
    known = known ? known + (std::min(cost, kMost * known) - known) * kShare : cost;
    const double other = cost_[!past];
    if (since_ >= (other ? kRest : kFirst) || (other && known > kWorse * other && since_ >= kSettled)) turn(true);
  }

 private:
  static constexpr double kMost = 2, kShare = 0.125, kWorse = 1.25, kBetter = 0.97;
  static constexpr int kTooDear = 4;  // blocks that cost twice as much end a try
  static constexpr size_t kMiB = 1 << 20, kFirst = 2 * kMiB, kRest = 256 * kMiB;
  // All slots of a connection are written so once; then it is judged.
  static constexpr size_t kSettled = 16 * kMiB, kJudged = 8 * kMiB;

  void tried(size_t bytes, double cost) {
    const double other = cost_[!past_], most = kMost * other;
    dear_ += cost > most;
    if (dear_ == kTooDear) {
      cost_[past_] = most;
      return turn(false);
    }
    if (since_ <= kSettled) return;
    sum_ += std::min(cost, most) * bytes;
    judged_ += bytes;
    if (judged_ < kJudged) return;
    cost_[past_] = sum_ / judged_;
    if (cost_[past_] >= kBetter * other) return turn(false);
    trying_ = false;
    since_ = 0;
  }

  void turn(bool to_try) {
    past_ = !past_;
    trying_ = to_try;
    since_ = judged_ = 0;
    sum_ = 0;
    dear_ = 0;
  }

  bool past_ = true, trying_ = false;
  double cost_[2] = {0, 0}, sum_ = 0;  // through them, past them; 0: not known
  size_t since_ = 0, judged_ = 0;
  int dear_ = 0;
};
