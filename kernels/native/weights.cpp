#include "weights.h"

#include <numeric>
#include <stdexcept>
#include <string>

namespace {

float widen(uint16_t bits) {
  uint32_t u = uint32_t(bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

}  // namespace

float Source::at(size_t row, size_t column) const {
  if (dtype == Dtype::f32) return this->row<float>(row)[column];
  return widen(this->row<uint16_t>(row)[column]);
}

size_t Panels::bytes_of_panel() const {
  if (dtype_ == Dtype::compact) return CompactPanel::bytes(blocks_);
  if (dtype_ == Dtype::fp8) return fp8_panel_bytes(blocks_);
  if (dtype_ == Dtype::i4) return groups_.panel_bytes(blocks_);
  if (dtype_ == Dtype::i8) return size_t(int8_blocks(inputs_)) * INT8_BLOCK;
  return size_t(blocks_) * PANEL_BLOCK * dtype_size(dtype_);
}

Panels::Panels(int count, int columns, int inputs, Dtype dtype, const Groups& groups, int places)
    : panels_(ceil_div(columns, PANEL)),
      blocks_(ceil_div(inputs, BLOCK)),
      inputs_(inputs),
      dtype_(dtype),
      groups_(groups),
      panel_bytes_(bytes_of_panel()),
      places_(places == NOWHERE ? count : places),
      place_(count, NOWHERE),
      memory_(size_t(places_) * panels_ * panel_bytes_) {
  if (places == NOWHERE) std::iota(place_.begin(), place_.end(), 0);
  if (dtype == Dtype::i8) {
    scales_.resize(size_t(count) * panels_ * PANEL, 1.0f);
    corrections_.resize(scales_.size());
  }
  if (dtype == Dtype::compact) compact_.resize(size_t(count) * panels_);
}

void Panels::put(int index, int place) {
  if (place < NOWHERE || place >= places_) throw std::out_of_range("place " + std::to_string(place) + " does not exist");
  place_[index] = place;
  for (size_t number = size_t(index) * panels_; !compact_.empty() && number < size_t(index + 1) * panels_; number++)
    compact_[number].clear();
}

// 64 weight rows become a panel just as 64 keys do.
template <class E>
void Panels::pack_panels(int index, const Source& source, const std::function<int(int)>& row_of) {
  static const Isa* isa = find_isa("");
  std::vector<E> zero(size_t(blocks_) * BLOCK);
  const E* rows[PANEL];
  std::vector<E> whole(dtype_ == Dtype::compact ? size_t(blocks_) * PANEL_BLOCK : 0);
  for (int panel = 0; panel < panels_; panel++) {
    for (int column = 0; column < PANEL; column++) {
      int row = row_of(panel * PANEL + column);
      rows[column] = row < 0 ? zero.data() : source.row<E>(row);
    }
    size_t number = size_t(index) * panels_ + panel;
    char* at = this->to(index, panel);
    E* to = whole.empty() ? reinterpret_cast<E*>(at) : whole.data();
    isa->of<E>().pack_keys(rows, PANEL, inputs_, blocks_, to);
    if constexpr (sizeof(E) == sizeof(bf16))
      if (!whole.empty()) compact_[number].pack(*isa, to, blocks_, at);
  }
}

void Panels::pack(int index, const Source& source, const std::function<int(int)>& row_of) {
  if (dtype_ == Dtype::bf16 || dtype_ == Dtype::compact) return pack_panels<bf16>(index, source, row_of);
  if (dtype_ == Dtype::f32 && source.dtype == Dtype::f32) return pack_panels<float>(index, source, row_of);
  if (dtype_ == Dtype::i8) return pack_int8(index, source, row_of);
  for (int column = 0; column < panels_ * PANEL; column++) {  // bf16 numbers, kept as floats
    int row = row_of(column);
    if (row < 0) continue;
    float* to = reinterpret_cast<float*>(this->to(index, column / PANEL)) + column % PANEL / 16 * TILE + column % 16;
    for (int k = 0; k < inputs_; k++) to[k / BLOCK * PANEL_BLOCK + k % BLOCK * 16] = source.at(row, k);
  }
}
