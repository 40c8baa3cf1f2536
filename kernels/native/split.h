// One dispatch in two passes over its choices: experts to slots, then the rows of each expert node into its mailbox;
// and the way back, partial sums added to the rows they belong to. Says what comm/m2n/rows.py says in PyTorch.
//
// Addresses, sizes and dtypes were checked by comm/m2n/rows.py. Expert ids are checked here, because they come from a
// router: one outside [0, experts) counts as no expert, like -1.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "address.h"
#include "element.h"
#include "mailbox.h"

// The slots of one layer of a placement, as the addresses of slot_EP (int32) and below_EP (float32).
struct Routes {
    const int32_t* slot;
    const float* below;
    int64_t experts;   // rows of slot_EP but the last, which stands for no expert
    int64_t replicas;  // P
    int64_t nodes;
    int64_t slots;

    Routes(uintptr_t slot_EP, uintptr_t below_EP, int64_t e, int64_t p, int64_t n, int64_t s)
        : slot(at<int32_t>(slot_EP)), below(at<float>(below_EP)), experts(e), replicas(p), nodes(n), slots(s) {}

    int32_t choose(int64_t expert, float number) const;
};

class RowSplit {
   public:
    // expert: int64 where `wide`, else int32, of (rows, choices).
    RowSplit(const Routes& routes, uintptr_t x, int64_t row_bytes, int64_t stride_bytes, uintptr_t expert,
             bool wide, int64_t rows, int64_t choices);

    // (node, rows) of every node that gets any.
    std::vector<std::pair<int64_t, int64_t>> parts() const;

    const std::vector<int32_t>& rows(size_t node) const { return rows_.at(node); }
    int64_t row_bytes() const { return row_bytes_; }
    int64_t choices() const { return choices_; }

    // What goes to a node, as a mailbox takes it. Where all rows do, they are one piece.
    Load load(size_t node, uintptr_t weight) const;

    // Slots as the node counts them, weights and, where x_out is not 0, the rows.
    void fill(size_t node, uintptr_t weight, uintptr_t x_out, uintptr_t slot_out, uintptr_t weight_out) const;

    // y[row] += part, in float32; `code` is 0 for float32 and 1 for bfloat16.
    void add(size_t node, uintptr_t part, int code, uintptr_t y, int64_t hidden) const;

   private:
    template <class T>
    void add_rows(size_t node, const T* part, float* y, int64_t hidden) const;

    const char* x_;
    int64_t row_bytes_;
    int64_t stride_;
    int64_t choices_;
    int64_t slots_;
    std::vector<int32_t> slot_;
    std::vector<std::vector<int32_t>> rows_;
};

// Copies slots and weights, then looks at the copy: true when every slot is in [-1, slots).
bool copy_choices(Address slot, Address weight, Address own_slot, Address own_weight, int64_t count, int64_t slots);
