#include "embedding.h"

#include <stdexcept>

#include "rows.h"

template <class E>
void Embedding::read(Engine& engine, const int64_t* token, int count, E* out) const {
  for (int t = 0; t < count; t++)
    if (token[t] < 0 || token[t] >= rows)
      throw std::out_of_range("token " + std::to_string(token[t]) + ": the embedding has " + std::to_string(rows) + " rows");
  auto store = engine.isa->of<E>().store;
  by_rows(engine, count, [&](size_t t) {
    E* to = out + t * size;
    if (type == NUMBERS) return void(memcpy(to, static_cast<const E*>(data) + token[t] * size, size * sizeof(E)));
    const GgmlShape shape = ggml_shape(GgmlType(type));
    auto* group = static_cast<const uint8_t*>(data) + token[t] * (size / shape.inputs) * shape.bytes;
    for (int i = 0; i < size; i += shape.inputs, group += shape.bytes) {
      float number[MOST_GGML_INPUTS];
      read_ggml_group(GgmlType(type), group, number);
      for (int c = 0; c < shape.inputs; c += PANEL) store(number + c, 1, nullptr, to + i + c, size, shape.inputs < PANEL ? shape.inputs : PANEL);
    }
  });
}

template void Embedding::read(Engine&, const int64_t*, int, bf16*) const;
template void Embedding::read(Engine&, const int64_t*, int, float*) const;
