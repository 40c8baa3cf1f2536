// Packs codes of 4 bits into panels (int4.h).
#include "int4.h"

#include <stdexcept>
#include <string>

#include "weights.h"

namespace {

// One column of a tile: 32 inputs, `n` of which there are.
void pack_int4_column(const int8_t* codes, int n, int column, char* tile) {
  int8_t padded[BLOCK] = {};
  if (n < BLOCK) codes = static_cast<const int8_t*>(memcpy(padded, codes, n));
  for (int line = 0; line < INT4_LINES; line++, codes += 8)
    for (int odd = 0; odd < 2; odd++) {
      int word = 0;
      for (int i = 0; i < 4; i++) word |= (codes[2 * i + odd] & 15) << (4 * i);
      uint16_t made = uint16_t(word);
      memcpy(tile + line * 64 + (column * 2 + odd) * 2, &made, 2);
    }
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
    char* to = memory_.data() + (size_t(index) * panels_ + column / PANEL) * panel_bytes_;
    const int8_t* codes = source.codes + size_t(row) * inputs_;
    for (int b = 0; b < blocks_; b++, to += INT4_BLOCK) {
      if (b % group == 0) {
        put_scale(source.scales[size_t(row) * groups + b / group], groups_.wide, to, within);
        to += groups_.scale_bytes();
      }
      int left = inputs_ - b * BLOCK;
      pack_int4_column(codes + b * BLOCK, left < BLOCK ? left : BLOCK, within % 16, to + within / 16 * INT4_TILE);
    }
  }
}
