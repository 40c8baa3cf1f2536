// Packs weights as whole numbers of 8 bits (int8.h).
#include "int8.h"

#include <math.h>

#include <algorithm>

#include "weights.h"

namespace {

// The scale of a row of weights; NaN if any is not finite, for bytes hold nothing of the kind.
float int8_scale(const float* weights, int count) {
  float most = 0, zero = 0;
  for (int k = 0; k < count; k++) {
    most = std::max(most, fabsf(weights[k]));
    zero += weights[k] * 0.0f;
  }
  if (zero != 0.0f) return NAN;
  return most > 0 ? most / 127.0f : 1.0f;
}

}  // namespace

void Panels::pack_int8(int index, const Source& source, const std::function<int(int)>& row_of) {
  std::vector<float> weights(inputs_);
  for (int column = 0; column < panels_ * PANEL; column++) {
    int row = row_of(column), within = column % PANEL;
    if (row < 0) continue;
    for (int k = 0; k < inputs_; k++) weights[k] = source.at(row, k);
    size_t panel = size_t(index) * panels_ + column / PANEL;
    float scale = int8_scale(weights.data(), inputs_);
    int8_t* tile = reinterpret_cast<int8_t*>(to(index, column / PANEL)) + within / 16 * INT8_TILE;
    int sum = 0;
    for (int k = 0; k < inputs_; k++) {
      int code = scale == scale ? int(lrintf(weights[k] / scale)) : 0;
      tile[k / INT8_INPUTS * INT8_BLOCK + int8_place(k % INT8_INPUTS, within % 16)] = int8_t(code);
      sum += code;
    }
    scales_[panel * PANEL + within] = scale;
    corrections_[panel * PANEL + within] = 128 * sum;
  }
}
