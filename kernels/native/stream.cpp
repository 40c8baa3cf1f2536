#include "stream.h"

uint64_t stream(Engine& engine, const void* data, size_t bytes) {
  constexpr size_t piece = size_t(1) << 20;
  std::atomic<uint64_t> total{0};
  engine.pool.run(int((bytes + piece - 1) / piece), [&](int index, int) {
    const uint64_t* word = static_cast<const uint64_t*>(data) + index * (piece / 8);
    size_t n = (bytes - index * piece < piece ? bytes - index * piece : piece) / 8;
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += word[i];
    total += sum;
  });
  return total;
}
