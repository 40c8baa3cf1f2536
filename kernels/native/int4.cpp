// Packs codes of 4 bits into panels (int4.h).
#include "int4.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "weights.h"

namespace {

#if !defined(__aarch64__)
// The codes in the four even bytes of a word, side by side: byte 2 i of `codes` goes to bits 4 i. No two products meet.
uint16_t side_by_side(uint64_t codes) {
  constexpr uint64_t even = 0x000f000f000f000f, gather = 1ull << 48 | 1ull << 36 | 1ull << 24 | 1ull << 12;
  return uint16_t((codes & even) * gather >> 48);
}
#endif

// The four bits of each number from -12 to 12; -1 where it is none.
std::array<int8_t, 25> e2m1_codes() {
  std::array<int8_t, 25> codes;
  codes.fill(-1);
  for (int8_t code = 15; code >= 0; code--) codes[E2M1_TWICE[code] + 12] = code;
  return codes;
}

int8_t e2m1_code(int8_t number) {
  static const std::array<int8_t, 25> codes = e2m1_codes();
  int8_t code = number < -12 || number > 12 ? -1 : codes[number + 12];
  if (code < 0) throw std::invalid_argument("code " + std::to_string(number) + " is not twice a number of e2m1");
  return code;
}

// One column of a tile: 32 inputs, `n` of which there are.
void pack_int4_column(const int8_t* codes, int n, bool e2m1, int column, char* tile) {
  int8_t padded[BLOCK] = {};
  if (n < BLOCK || e2m1) codes = static_cast<const int8_t*>(memcpy(padded, codes, n));
  if (e2m1) std::transform(padded, padded + n, padded, e2m1_code);
#if defined(__aarch64__)
  for (int k = 0; k < BLOCK; k += k % 8 == 7 ? 9 : 1)
    tile[int4_byte(k, column)] = char((codes[k] & 15) | codes[k + 8] << 4);
#else
  for (int line = 0; line < INT4_LINES; line++, codes += 8) {
    uint64_t eight;
    memcpy(&eight, codes, 8);
    if (!e2m1) eight ^= 0x0808080808080808;
    uint16_t words[2] = {side_by_side(eight), side_by_side(eight >> 8)};
    memcpy(tile + line * 64 + column * 4, words, 4);
  }
#endif
}

void put_scale(float scale, bool wide, char* scales, int column) {
  uint32_t bits;
  memcpy(&bits, &scale, 4);
  if (wide) return void(memcpy(scales + column * 4, &bits, 4));
  if (bits & 0xffff) throw std::invalid_argument("scale " + std::to_string(scale) + " is not a bfloat16 number");
  uint16_t high = uint16_t(bits >> 16);
  memcpy(scales + column * 2, &high, 2);
}

}  // namespace

void Panels::pack_int4(int index, const Int4Source& source, const std::function<int(int)>& row_of) {
  if (dtype_ != Dtype::i4) throw std::invalid_argument("these weights are not kept as int4");
  int group = groups_.blocks(), groups = ceil_div(inputs_, groups_.inputs);
  for (int column = 0; column < panels_ * PANEL; column++) {
    int row = row_of(column), within = column % PANEL;
    if (row < 0) continue;
    char* to = this->to(index, column / PANEL);
    const int8_t* codes = source.codes + size_t(row) * inputs_;
    for (int b = 0; b < blocks_; b++, to += INT4_BLOCK) {
      if (b % group == 0) {
        put_scale(source.scales[size_t(row) * groups + b / group], groups_.wide, to, within);
        to += groups_.scale_bytes();
      }
      int left = inputs_ - b * BLOCK;
      pack_int4_column(codes + b * BLOCK, left < BLOCK ? left : BLOCK, groups_.e2m1, within % 16, to + within / 16 * INT4_TILE);
    }
  }
}
