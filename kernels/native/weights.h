// Weight matrices in panel order (isa.h): made once at load, read by every product.
#pragma once
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "compact.h"
#include "engine.h"
#include "fp8.h"
#include "int4.h"
#include "int8.h"
#include "isa.h"
#include "memory.h"

// A read-only matrix as the caller has it; rows are `stride` elements apart. Rows from `split` on may lie in memory of
// their own, `second`.
struct Source {
  const void* data;
  Dtype dtype;
  size_t stride;
  const void* second = nullptr;
  size_t split = 0;
  float at(size_t row, size_t column) const;

  template <class E>
  const E* row(size_t row) const {
    bool below = second && row >= split;
    return static_cast<const E*>(below ? second : data) + (below ? row - split : row) * stride;
  }
};

// `count` matrices of the same shape: column panels of `inputs` inputs. int8 weights have one scale per column;
// compact and FP8 ones multiply bf16 rows only. There may be memory for fewer: matrices are then in `places` of it in turn.
class Panels {
 public:
  static constexpr int NOWHERE = -1;

  // `row_of(column)` is the source row of a padded column, or -1 for padding.
  Panels(int count, int columns, int inputs, Dtype dtype, const Groups& groups = {}, int places = NOWHERE);

  // Kept as ggml's types: one of each panel, or one of all. Throws where the inputs are not whole groups.
  Panels(int count, int columns, int inputs, const std::vector<GgmlType>& types, int places = NOWHERE);

  // Its weights are at this place from now on, once they are packed; NOWHERE: it has none. Nobody may read it meanwhile.
  void put(int index, int place);
  bool placed(int index) const { return place_[index] != NOWHERE; }

  void pack(int index, const Source& source, const std::function<int(int)>& row_of);

  // The same for int4 weights, whose codes and scales the caller has.
  void pack_int4(int index, const Int4Source& source, const std::function<int(int)>& row_of);

  // The same for FP8 weights; a group with a code that is no number is none at all.
  void pack_fp8(int index, const Fp8Source& source, const std::function<int(int)>& row_of);

  // The same for rows of ggml's types, as files have them, one after the other; all panels that get any are of one type.
  void pack_ggml(int index, const void* rows, const std::function<int(int)>& row_of);

  int panels() const { return panels_; }
  int blocks() const { return blocks_; }
  int inputs() const { return inputs_; }
  Dtype dtype() const { return dtype_; }
  size_t bytes() const { return memory_.bytes(); }

  const char* at(int index, int panel) const {
    if (dtype_ == Dtype::ggml) return memory_.data() + place_[index] * offsets_[panels_] + offsets_[panel];
    return memory_.data() + (size_t(place_[index]) * panels_ + panel) * panel_bytes_;
  }

  // `count` rows as the products want them: also as bytes, in scratch memory of this op, where they are multiplied so.
  template <class E>
  Rows<E> operand(Engine& engine, Rows<E> rows, int count) const {
    rows.bytes = bytes_in<E>(*engine.isa, count, engine.shared[2]);
    if (!rows.bytes.data) return rows;
    engine.pool.run(ceil_div(count, OPERANDS), [&](int index, int) {
      for (int r = index * OPERANDS; r < count && r < (index + 1) * OPERANDS; r++)
        convert(*engine.isa, rows.data + r * rows.stride, rows.bytes, r);
    });
    return rows;
  }

  // The same within one task, in `memory` of at least `operand_bytes(count)`.
  template <class E>
  Rows<E> operand_at(const Isa& isa, Rows<E> rows, int count, char* memory) const {
    if (!multiplies_bytes<E>(isa)) return rows;
    rows.bytes = bytes_at(count, memory);
    for (int r = 0; r < count; r++) convert(isa, rows.data + r * rows.stride, rows.bytes, r);
    return rows;
  }

  static constexpr int OPERANDS = 16;  // rows of one task that makes bytes of them

  // Whether rows are multiplied as bytes, and where those of `count` rows are in memory for them.
  ByteRows bytes_at(int count, char* memory) const {
    size_t numbers = 2 * size_t(count + ROW_GROUP) * byte_stride();
    return {reinterpret_cast<uint8_t*>(memory), byte_stride(), reinterpret_cast<float*>(memory + numbers)};
  }
  template <class E>
  bool multiplies_bytes(const Isa& isa) const {
    return sizeof(E) == sizeof(bf16) && converter(isa);
  }

  // Room for the bytes of so many rows; none where rows are multiplied as they are.
  template <class E>
  ByteRows bytes_in(const Isa& isa, int count, Memory& memory) const {
    return multiplies_bytes<E>(isa) ? bytes_at(count, memory.at_least<char>(operand_bytes(count))) : ByteRows{};
  }

  // Row r of `to` becomes the bytes of x, which has as many numbers as there are inputs.
  template <class E>
  void convert(const Isa& isa, const E* x, const ByteRows& to, int r) const {
    if constexpr (sizeof(E) == sizeof(bf16)) converter(isa)(x, inputs_, to, r);
  }

  size_t operand_bytes(int count) const { return 2 * size_t(count + ROW_GROUP) * byte_stride() + count * sizeof(float); }

  // sum[rows][64] = a * panel, scaled when the weights are int8. `after`: the panel that this thread will most likely
  // read next, if it is not the one that follows.
  template <class E>
  void multiply(const Isa& isa, int index, int panel, const Rows<E>& x, int rows, float* sum,
                const char* after = nullptr) const {
    size_t number = size_t(index) * panels_ + panel, stride = x.stride;
    const E* a = x.data;
    const char* at = this->at(index, panel);
    if (dtype_ == Dtype::ggml) return multiply_ggml(isa, panel, at, x, rows, sum, after);
    if (!after) after = at + panel_bytes_;
    if constexpr (sizeof(E) == sizeof(bf16)) {
      if (dtype_ == Dtype::fp8) return gemm_fp8(isa, a, stride, rows, at, blocks_, sum);
      if (dtype_ == Dtype::compact) return compact_[number].multiply(isa, at, a, stride, rows, blocks_, sum, after);
    }
    if (dtype_ == Dtype::i4) return multiply_i4(isa, {at, blocks_, groups_.blocks(), groups_.wide, groups_.e2m1}, x, rows, sum, after);
    if (dtype_ != Dtype::i8) {
      Next next{after, int(panel_bytes_ / 64)};
      isa.of<E>().gemm(a, stride, rows, reinterpret_cast<const E*>(at), blocks_, sum, false, next);
      return;
    }
    Int8Panel weights{reinterpret_cast<const int8_t*>(at), int8_blocks(inputs_), scales_.data() + number * PANEL,
                      corrections_.data() + number * PANEL};
    if (x.bytes.data) return isa.gemm_bytes(x.bytes, rows, weights, sum, {after, int(panel_bytes_ / 64)});
    isa.of<E>().gemm_i8(a, stride, rows, weights, blocks_, sum);
  }

 private:
  template <class E>
  void multiply_i4(const Isa& isa, const Int4Panel& panel, const Rows<E>& x, int rows, float* sum, const char* after) const {
    if (x.bytes.data) return isa.gemm_words(x.bytes, rows, panel, sum, {after, int(panel_bytes_ / 64)});
    if constexpr (sizeof(E) == sizeof(bf16))
      if (isa.int4_fast && isa.int4_fast(x.data, x.stride, rows, panel, sum, after)) return;
    isa.of<E>().gemm_i4(x.data, x.stride, rows, panel, sum);
  }

  template <class E>
  void multiply_ggml(const Isa& isa, int panel, const char* at, const Rows<E>& x, int rows, float* sum, const char* after) const {
    size_t bytes = offsets_[panel + 1] - offsets_[panel];
    GgmlPanel weights{at, blocks_, types_[panel]};
    if (x.bytes.data) return isa.gemm_ggml(x.bytes, rows, weights, sum, {after ? after : at + bytes, int(bytes / 64)});
    isa.of<E>().gemm_ggml(x.data, x.stride, rows, weights, sum);
  }

  // Numbers of a row as whole numbers of 16 bits: so many of them, and with weights of fewer than 8 bits or ggml's types
  // room for what sums are put right by. An odd number of lines, so that rows lie in all sets of a cache.
  size_t byte_stride() const {
    size_t numbers = size_t(int8_blocks(inputs_)) * INT8_INPUTS;
    size_t sums = dtype_ == Dtype::i4 ? blocks_ : dtype_ == Dtype::ggml ? numbers / GGML_SUMS : 0;
    size_t lines = numbers / 64 + (sums * sizeof(int32_t) + 63) / 64;
    return (lines | 1) * 64;
  }

  // What makes whole numbers of bf16 rows for these weights; null where the rows are multiplied as they are.
  auto converter(const Isa& isa) const -> decltype(isa.to_bytes) {
    if (dtype_ == Dtype::i4) return isa.to_words;
    if (dtype_ == Dtype::ggml) return isa.gemm_ggml ? isa.to_ggml : nullptr;
    return dtype_ == Dtype::i8 && inputs_ <= MOST_INT8_INPUTS ? isa.to_bytes : nullptr;
  }

  size_t bytes_of_panel() const;
  char* to(int index, int panel) {
    if (!placed(index)) throw std::out_of_range("matrix " + std::to_string(index) + " has no place in memory");
    return const_cast<char*>(at(index, panel));
  }
  template <class E>
  void pack_panels(int index, const Source& source, const std::function<int(int)>& row_of);
  void pack_int8(int index, const Source& source, const std::function<int(int)>& row_of);

  int panels_, blocks_, inputs_;
  Dtype dtype_;
  Groups groups_;
  size_t panel_bytes_;
  int places_;
  std::vector<int> place_;  // by matrix; as many as there are, in their order, where each has one of its own
  Memory memory_;
  std::vector<float> scales_;         // of int8 weights, and what its products are put right by
  std::vector<int32_t> corrections_;
  std::vector<CompactPanel> compact_;
  std::vector<GgmlType> types_;  // by panel, and where each begins in its matrix; the last is the matrix's size
  std::vector<size_t> offsets_;
};
