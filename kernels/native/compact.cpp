#include "compact.h"

#include <algorithm>

namespace {

constexpr size_t MOST_PATCHES = 64;  // one in this many weights; beyond that the panel stays as it is

// The 16 most frequent high bytes, of an eighth of the weights: of each line of 32 another word, so that every column is
// looked at as often. What the others have besides becomes patches. Words are counted in four tables, since most high
// bytes are the same few, and an addition to one waits for the addition before it.
void choose_high(const bf16* panel, size_t count, uint8_t* high) {
  constexpr size_t LINE = 32, WORD = 4;
  uint32_t seen[WORD][256] = {};
  for (size_t line = 0; line < count / LINE; line++) {
    const bf16* word = panel + line * LINE + line % (LINE / WORD) * WORD;
    for (size_t i = 0; i < WORD; i++) seen[i][word[i].bits >> 8]++;
  }
  for (int byte = 0; byte < 256; byte++)
    for (size_t i = 1; i < WORD; i++) seen[0][byte] += seen[i][byte];
  for (int k = 0; k < 16; k++) {
    uint32_t* most = std::max_element(seen[0], seen[0] + 256);
    high[k] = uint8_t(most - seen[0]);
    *most = 0;
  }
}

}  // namespace

void CompactPanel::pack(const Isa& isa, const bf16* panel, int blocks, char* to) {
  size_t count = size_t(blocks) * PANEL_BLOCK;
  uint8_t* high = reinterpret_cast<uint8_t*>(to);
  memset(high, 0, COMPACT_HEAD);
  choose_high(panel, count, high);
  std::vector<uint64_t> missing(count / 64);
  isa.compact(panel, blocks * BLOCK_UNITS, high, high + COMPACT_HEAD, missing.data());
  patches_.clear();
  for (size_t i = 0; i < missing.size(); i++)
    for (uint64_t bits = missing[i]; bits; bits &= bits - 1) {
      uint32_t place = uint32_t(i * 64 + __builtin_ctzll(bits));
      patches_.push_back({place, panel[place]});
    }
  if (patches_.size() * MOST_PATCHES <= count) {
    whole_.resize(0);
    return;
  }
  patches_.clear();
  whole_.resize(count * sizeof(bf16));
  memcpy(whole_.data(), panel, count * sizeof(bf16));
}

void CompactPanel::multiply(const Isa& isa, const char* at, const bf16* a, size_t stride, int rows, int blocks,
                            float* sum, const char* after) const {
  if (whole_.bytes()) {
    const bf16* panel = reinterpret_cast<const bf16*>(whole_.data());
    return isa.b.gemm(a, stride, rows, panel, blocks, sum, false, {});
  }
  const uint8_t* high = reinterpret_cast<const uint8_t*>(at);
  const uint8_t* units = high + COMPACT_HEAD;
  const Patch *patch = patches_.data(), *end = patch + patches_.size();
  if (isa.compact_few_rows && isa.compact_few_rows(a, stride, rows, units, high, blocks, patch, end, sum, after)) return;
  // What is expanded stays in a near cache. With few rows it is most of the work, and asks for what is after it
  // itself; with many, the product has the time.
  alignas(64) bf16 wide[MOST_EXPANDED * PANEL_BLOCK];
  bool few = rows <= 2 * ROW_GROUP;
  int chunk = rows <= ROW_GROUP ? 2 : few ? 4 : isa.expand_blocks;
  for (int b = 0; b < blocks; b += chunk) {
    int n = std::min(chunk, blocks - b);
    uint32_t first = uint32_t(b) * PANEL_BLOCK, last = first + uint32_t(n) * PANEL_BLOCK;
    units += size_t(n) * BLOCK_UNITS * UNIT_BYTES;
    const char* ahead = b + n < blocks ? reinterpret_cast<const char*>(units) : after;
    isa.expand(units - size_t(n) * BLOCK_UNITS * UNIT_BYTES, n * BLOCK_UNITS, high, wide, few ? ahead : nullptr);
    for (; patch != end && patch->place < last; ++patch) wide[patch->place - first] = patch->value;
    Next next{ahead, few ? 0 : chunk * BLOCK_UNITS * UNIT_BYTES / 64};
    isa.b.gemm(a + b * BLOCK, stride, rows, wide, n, sum, b > 0, next);
  }
}
