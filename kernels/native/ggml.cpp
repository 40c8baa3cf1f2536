// Packs rows of ggml's types into panels (ggml.h).
#include "ggml.h"

#include <numeric>
#include <stdexcept>
#include <string>

#include "weights.h"

namespace {

void halves(const uint8_t* bytes, int count, uint8_t* codes) {  // low halves of all, then the high ones
  for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15, codes[i + count] = bytes[i] >> 4;
}

// A row's group as codes in the order of inputs.
void codes_of(GgmlType type, const uint8_t* group, uint8_t* codes) {
  switch (type) {
    case GgmlType::q4_0:
      return halves(group + 2, 16, codes);
    case GgmlType::q5_0: {
      uint32_t fifth;
      memcpy(&fifth, group + 2, 4);
      halves(group + 6, 16, codes);
      for (int i = 0; i < 32; i++) codes[i] |= (fifth >> i & 1) << 4;
      return;
    }
    case GgmlType::q8_0:
      for (int i = 0; i < 32; i++) codes[i] = group[2 + i] ^ 0x80;
      return;
    case GgmlType::q4_k:
      for (int c = 0; c < 4; c++) halves(group + 16 + 32 * c, 32, codes + 64 * c);
      return;
    case GgmlType::q5_k:
      for (int c = 0; c < 4; c++) halves(group + 48 + 32 * c, 32, codes + 64 * c);
      for (int i = 0; i < 256; i++) codes[i] |= (group[16 + i % 32] >> i / 32 & 1) << 4;
      return;
    case GgmlType::q6_k:
      for (int c = 0; c < 2; c++) halves(group + 64 * c, 64, codes + 128 * c);
      for (int i = 0; i < 256; i++) codes[i] |= (group[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
  }
}

// The scales of a row's group, a column of the panel's.
void put_scales(GgmlType type, const uint8_t* group, int column, char* to) {
  auto half = [&](const uint8_t* from, int kind) { memcpy(to + 128 * kind + 2 * column, from, 2); };
  if (type == GgmlType::q6_k) {
    half(group + 208, 0);
    for (int i = 0; i < 16; i++) to[128 + 64 * i + column] = char(group[192 + i]);
    return;
  }
  half(group, 0);
  if (!has_minima(type)) return;
  half(group + 2, 1);
  for (int i = 0; i < 12; i++) to[256 + 64 * i + column] = char(group[4 + i]);
}

#if defined(__aarch64__)
void put_block(int bits, const uint8_t* codes, int column, char* tile) {
  for (int k = 0; k < BLOCK; k++) {
    CodePlace place = ggml_place(bits, k, column);
    auto put = [&](int at, int shift, int mask, int code) {
      tile[at] = char((uint8_t(tile[at]) & ~(mask << shift)) | code << shift);
    };
    put(place.low, place.low_shift, bits == 8 ? 255 : 15, bits == 8 ? codes[k] : codes[k] & 15);
    if (bits == 5 || bits == 6) put(place.high, place.high_shift, bits == 5 ? 1 : 3, codes[k] >> 4);
  }
}
#else
// Bytes 0 and 1 of a word become its bytes 0 and 2.
uint32_t apart(uint32_t word) { return (word & 0xff) | (word & 0xff00) << 8; }

// The 32 codes of a column in vectors of four (ggml.h).
void put_block(int bits, const uint8_t* codes, int column, char* tile) {
  uint32_t vector[8], high[2] = {};
  for (int line = 0; line < 4; line++) {
    uint32_t first, second;
    memcpy(&first, codes + line * 8, 4);
    memcpy(&second, codes + line * 8 + 4, 4);
    vector[2 * line] = apart(first) | apart(second) << 8;
    vector[2 * line + 1] = apart(first >> 16) | apart(second >> 16) << 8;
  }
  char* to = tile + column * 4;
  if (bits == 8) {
    for (int v = 0; v < 8; v++) memcpy(to + v * 64, vector + v, 4);
    return;
  }
  for (int v = 0; v < 8; v += 2) {
    uint32_t both = (vector[v] & 0x0f0f0f0f) | (vector[v + 1] & 0x0f0f0f0f) << 4;
    memcpy(to + v / 2 * 64, &both, 4);
  }
  for (int v = 0; v < 8; v++) {
    if (bits == 5) high[0] |= (vector[v] >> 4 & 0x01010101) << v;
    if (bits == 6) high[v / 4] |= (vector[v] >> 4 & 0x03030303) << v % 4 * 2;
  }
  for (int i = 0; i < bits - 4; i++) memcpy(to + 256 + i * 64, high + i, 4);
}
#endif

}  // namespace

// Products of steps and codes are exact, so only taking minima off rounds.
void read_ggml_group(GgmlType type, const uint8_t* group, float* numbers) {
  const GgmlShape shape = ggml_shape(type);
  uint8_t codes[MOST_GGML_INPUTS];
  char scales[18 * PANEL];  // of a column, as a panel has them
  codes_of(type, group, codes);
  put_scales(type, group, 0, scales);
  for (int first = 0; first < shape.inputs; first += GGML_SUMS) {
    GgmlScale scale = ggml_scale(type, scales, first / BLOCK, first / GGML_SUMS % 2, 0);
    float least = has_minima(type) ? scale.least : 0.0f;
    for (int i = first; i < first + GGML_SUMS; i++) numbers[i] = scale.step * float(codes[i] - shape.offset) - least;
  }
}

Panels::Panels(int count, int columns, int inputs, const std::vector<GgmlType>& types, int places)
    : panels_(ceil_div(columns, PANEL)),
      blocks_(ceil_div(inputs, BLOCK)),
      inputs_(inputs),
      dtype_(Dtype::ggml),
      panel_bytes_(0),
      places_(places == NOWHERE ? count : places),
      place_(count, NOWHERE),
      types_(types) {
  if (types_.size() == 1) types_.resize(panels_, types[0]);
  if (int(types_.size()) != panels_) throw std::invalid_argument("each panel of 64 outputs has one type");
  offsets_.push_back(0);
  for (GgmlType type : types_) {
    GgmlShape shape = ggml_shape(type);
    if (inputs % shape.inputs)
      throw std::invalid_argument(std::to_string(inputs) + " inputs are no multiple of " + std::to_string(shape.inputs));
    offsets_.push_back(offsets_.back() + shape.panel_bytes(inputs));
  }
  memory_.resize(offsets_.back() * places_);
  if (places == NOWHERE) std::iota(place_.begin(), place_.end(), 0);
}

void Panels::pack_ggml(int index, const void* rows, const std::function<int(int)>& row_of) {
  if (dtype_ != Dtype::ggml) throw std::invalid_argument("these weights are not kept as ggml's types");
  uint8_t codes[MOST_GGML_INPUTS];
  for (int column = 0; column < panels_ * PANEL; column++) {
    int row = row_of(column), panel = column / PANEL, within = column % PANEL;
    if (row < 0) continue;
    GgmlShape shape = ggml_shape(types_[panel]);
    const uint8_t* group = static_cast<const uint8_t*>(rows) + size_t(row) * (inputs_ / shape.inputs) * shape.bytes;
    char* to = this->to(index, panel);
    for (int k = 0; k < inputs_; k += shape.inputs, group += shape.bytes) {
      put_scales(types_[panel], group, within, to);
      to += shape.scale_bytes();
      codes_of(types_[panel], group, codes);
#if defined(__aarch64__)
      for (int i = 0; i < shape.inputs; i++) codes[i] ^= uint8_t(shape.offset);
#endif
      for (int b = 0; b < shape.blocks(); b++, to += shape.block_bytes())
        put_block(shape.bits, codes + b * BLOCK, within % 16, to + within / 16 * shape.tile_bytes());
    }
  }
}
