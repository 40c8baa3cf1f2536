// Which way blocks go quicker to where another core reads them: through the caches or past them. On one AMD machine it
// may be either, by the cores that the two processes run on at the time. Cores that share a cache hand lines over at
// once; between others a line comes slower than from memory. So each block's cost is told, and the way that was dearer
// is tried now and then: the more seldom, the dearer. It knows no blocks and no clock.
#pragma once
#include <algorithm>

class QuickerStores {
 public:
  // Whether the next block is to go past the caches.
  bool past() {
    if (!cost_[1] || !cost_[0]) return !cost_[1];
    const bool past = cost_[1] <= cost_[0];
    if (++since_ < rest()) return past;
    since_ = 0;
    return !past;
  }

  // What a block that went there cost, per byte, in any unit. One that was interrupted counts little.
  void took(bool past, double cost) {
    double& known = cost_[past];
    if (!known) {
      known = cost;
      return;
    }
    const bool tried = known > cost_[!past];
    known += (std::min(cost, kMost * known) - known) * (tried ? kOfTry : kOfBlock);
  }

 private:
  static constexpr double kMost = 2, kOfTry = 0.5, kOfBlock = 0.125;
  static constexpr int kRest = 32, kLongestRest = 512;  // blocks from one try to the next

  int rest() const {
    const double ratio = std::max(cost_[0], cost_[1]) / std::min(cost_[0], cost_[1]);
    return static_cast<int>(std::min<double>(kRest * ratio * ratio, kLongestRest));
  }

  double cost_[2] = {0, 0};  // through them, past them; 0: not known
  int since_ = 0;
};
