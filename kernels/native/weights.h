// Weight matrices in panel order (isa.h): made once at load, read by every product.
#pragma once
#include <functional>
#include <vector>

#include "compact.h"
#include "engine.h"
#include "int4.h"
#include "isa.h"
#include "memory.h"

// A read-only matrix as the caller has it; rows are `stride` elements apart.
struct Source {
  const void* data;
  Dtype dtype;
  size_t stride;
  float at(size_t row, size_t column) const;
};

// `count` matrices of the same shape: column panels of `inputs` inputs. int8 weights have one scale per column;
// compact ones multiply bf16 rows only.
class Panels {
 public:
  // `row_of(column)` is the source row of a padded column, or -1 for padding.
  Panels(int count, int columns, int inputs, Dtype dtype, const Groups& groups = {});
  void pack(int index, const Source& source, const std::function<int(int)>& row_of);

  // The same for int4 weights, whose codes and scales the caller has.
  void pack_int4(int index, const Int4Source& source, const std::function<int(int)>& row_of);

  int panels() const { return panels_; }
  int blocks() const { return blocks_; }
  int inputs() const { return inputs_; }
  Dtype dtype() const { return dtype_; }
  size_t bytes() const { return memory_.bytes(); }

  const char* at(int index, int panel) const {
    return memory_.data() + (size_t(index) * panels_ + panel) * panel_bytes_;
  }

  // sum[rows][64] = a * panel, scaled when the weights are int8. `after`: the panel that this thread will most likely
  // read next, if it is not the one that follows.
  template <class E>
  void multiply(const Isa& isa, int index, int panel, const E* a, size_t stride, int rows, float* sum,
                const char* after = nullptr) const {
    size_t number = size_t(index) * panels_ + panel;
    const char* at = this->at(index, panel);
    if (!after) after = at + panel_bytes_;
    if constexpr (sizeof(E) == sizeof(bf16))
      if (dtype_ == Dtype::compact) return compact_[number].multiply(isa, at, a, stride, rows, blocks_, sum, after);
    if (dtype_ == Dtype::i4) return multiply_i4(isa, {at, blocks_, groups_.blocks(), groups_.wide}, a, stride, rows, sum, after);
    if (dtype_ != Dtype::i8) {
      Next next{after, int(panel_bytes_ / 64)};
      isa.of<E>().gemm(a, stride, rows, reinterpret_cast<const E*>(at), blocks_, sum, false, next);
      return;
    }
    multiply_i8(isa, reinterpret_cast<const int8_t*>(at), a, stride, rows, sum, after);
    isa.scale_columns(sum, rows, scales_.data() + number * PANEL);
  }

 private:
  template <class E>
  void multiply_i8(const Isa& isa, const int8_t* at, const E* a, size_t stride, int rows, float* sum,
                   const char* after) const {
    if constexpr (sizeof(E) == sizeof(bf16))
      if (isa.int8_few_rows && isa.int8_few_rows(a, stride, rows, at, blocks_, sum, after)) return;
    isa.of<E>().gemm_i8(a, stride, rows, at, blocks_, sum, false);
  }

  template <class E>
  static void multiply_i4(const Isa& isa, const Int4Panel& panel, const E* a, size_t stride, int rows, float* sum,
                          const char* after) {
    if constexpr (sizeof(E) == sizeof(bf16))
      if (isa.int4_few_rows && isa.int4_few_rows(a, stride, rows, panel, sum, after)) return;
    isa.of<E>().gemm_i4(a, stride, rows, panel, sum);
  }

  size_t bytes_of_panel() const;
  template <class E>
  void pack_panels(int index, const Source& source, const std::function<int(int)>& row_of);
  void pack_column(char* panel, int column, const Source& source, int row, float* scale);

  int panels_, blocks_, inputs_;
  Dtype dtype_;
  Groups groups_;
  size_t panel_bytes_;
  Memory memory_;
  std::vector<float> scales_;
  std::vector<CompactPanel> compact_;
};
