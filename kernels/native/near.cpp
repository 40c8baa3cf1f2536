#include "near.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "rows.h"

void NearRows::forget(const int64_t* slot, int tokens) const {
  for (int t = 0; t < tokens; t++)
    if (slot[t] >= 0) place_of[slot[t]] = -1;
}

void NearRows::fetch(Engine& engine, const int32_t* slot, const int32_t* count, size_t most, int tokens, int32_t* place) const {
  if (size_t(tokens) * most > size_t(capacity))
    throw std::invalid_argument("near rows: " + std::to_string(tokens) + " tokens of " + std::to_string(most) + " rows, room for " +
                                std::to_string(capacity));
  int64_t now = ++counts[0], found = 0;
  std::vector<size_t> missing;
  for (int t = 0; t < tokens; t++)
    for (size_t at = t * most, end = at + count[t]; at < end; at++) {
      if (slot[at] < 0 || slot[at] >= slots) throw std::invalid_argument("near rows: slot " + std::to_string(slot[at]));
      int32_t there = place_of[slot[at]];
      place[at] = there;
      if (there < 0)
        missing.push_back(at);
      else
        used[there] = now, found++;
    }
  // Places of the call before stay while others are left; of this call there are fewer than places.
  std::vector<std::pair<int32_t, int32_t>> copies;
  int passed = 0;
  auto next_place = [&] {
    for (;; passed++) {
      int32_t here = int32_t(counts[1]);
      counts[1] = here + 1 < capacity ? here + 1 : 0;
      if (used[here] < now - (passed < capacity)) return here;
    }
  };
  for (size_t at : missing) {
    int32_t& there = place_of[slot[at]];
    if (there < 0) {
      int32_t free = next_place(), old = slot_of[free];
      if (old >= 0 && place_of[old] == free) place_of[old] = -1;
      slot_of[free] = slot[at], used[free] = now, there = free;
      copies.emplace_back(free, slot[at]);
    } else {
      found++;
    }
    place[at] = there;
  }
  counts[2] += found, counts[3] += int64_t(copies.size());
  by_rows(engine, int(copies.size()), [&](size_t r) {
    std::memcpy(rows + size_t(copies[r].first) * row_bytes, far + size_t(copies[r].second) * row_bytes, row_bytes);
  });
}
