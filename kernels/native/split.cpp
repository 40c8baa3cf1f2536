#include "split.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

constexpr uint64_t kMix[] = {0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 0x4CF5AD432745937F};
constexpr int kBits = 24;
constexpr int64_t kKeyBytes = 16;

// u in [0, 1) from the first 16 bytes of a row.
float row_number(const char* row, int64_t bytes) {
    uint64_t word[2] = {0, 0};
    std::memcpy(word, row, std::min(bytes, kKeyBytes));
    uint64_t mixed = word[0] * kMix[0] + word[1] * kMix[1];
    mixed = (mixed ^ static_cast<uint64_t>(static_cast<int64_t>(mixed) >> 29)) * kMix[2];
    return static_cast<float>(mixed >> (64 - kBits)) / static_cast<float>(1 << kBits);
}

}  // namespace

int32_t Routes::choose(int64_t expert, float number) const {
    if (expert < 0 || expert >= experts) return -1;
    int64_t replica = 0;
    for (int64_t p = 0; p + 1 < replicas; ++p) replica += number >= below[expert * (replicas - 1) + p];
    return slot[expert * replicas + replica];
}

RowSplit::RowSplit(const Routes& routes, uintptr_t x, int64_t row_bytes, int64_t stride_bytes, uintptr_t expert,
                   bool wide, int64_t rows, int64_t choices)
    : x_(at<char>(x)), row_bytes_(row_bytes), stride_(stride_bytes), choices_(choices), slots_(routes.slots) {
    slot_.resize(rows * choices);
    rows_.resize(routes.nodes);
    std::vector<char> sent(routes.nodes);
    for (int64_t row = 0; row < rows; ++row) {
        float number = routes.replicas > 1 ? row_number(x_ + row * stride_, row_bytes) : 0.0f;
        std::fill(sent.begin(), sent.end(), 0);
        for (int64_t k = 0; k < choices; ++k) {
            int64_t i = row * choices + k;
            int32_t slot = routes.choose(wide ? at<int64_t>(expert)[i] : at<int32_t>(expert)[i], number);
            slot_[i] = slot;
            if (slot < 0 || sent[slot / slots_]) continue;
            sent[slot / slots_] = 1;
            rows_[slot / slots_].push_back(static_cast<int32_t>(row));
        }
    }
}

std::vector<std::pair<int64_t, int64_t>> RowSplit::parts() const {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (size_t node = 0; node < rows_.size(); ++node)
        if (!rows_[node].empty()) found.emplace_back(node, rows_[node].size());
    return found;
}

Load RowSplit::load(size_t node, uintptr_t weight) const {
    const std::vector<int32_t>& which = rows_.at(node);
    bool all = choices_ > 0 && which.size() * choices_ == slot_.size();
    return {x_, stride_, slot_.data(), at<float>(weight), all ? nullptr : which.data(),
            static_cast<int64_t>(which.size()), static_cast<int32_t>(node * slots_)};
}

void RowSplit::fill(size_t node, uintptr_t weight, uintptr_t x_out, uintptr_t slot_out, uintptr_t weight_out) const {
    auto first = static_cast<int32_t>(node * slots_);
    auto* to_slot = at<int32_t>(slot_out);
    auto* to_weight = at<float>(weight_out);
    auto* to_x = at<char>(x_out);
    for (int32_t row : rows_.at(node)) {
        for (int64_t k = 0; k < choices_; ++k) {
            int32_t slot = slot_[row * choices_ + k] - first;
            *to_slot++ = slot >= 0 && slot < slots_ && slot_[row * choices_ + k] >= 0 ? slot : -1;
        }
        std::memcpy(to_weight, at<float>(weight) + row * choices_, choices_ * sizeof(float));
        to_weight += choices_;
        if (!to_x) continue;
        std::memcpy(to_x, x_ + row * stride_, row_bytes_);
        to_x += row_bytes_;
    }
}

template <class T>
void RowSplit::add_rows(size_t node, const T* part, float* y, int64_t hidden) const {
    for (int32_t row : rows_.at(node)) {
        float* to = y + row * hidden;
        for (int64_t h = 0; h < hidden; ++h) to[h] += to_float(part[h]);
        part += hidden;
    }
}

void RowSplit::add(size_t node, uintptr_t part, int code, uintptr_t y, int64_t hidden) const {
    if (code == static_cast<int>(Dtype::f32)) add_rows(node, at<float>(part), at<float>(y), hidden);
    else if (code == static_cast<int>(Dtype::bf16)) add_rows(node, at<bf16>(part), at<float>(y), hidden);
    else throw std::invalid_argument("dtype code " + std::to_string(code));
}

bool copy_choices(Address slot, Address weight, Address own_slot, Address own_weight, int64_t count, int64_t slots) {
    auto* to = at<int32_t>(own_slot);
    std::memcpy(to, at<int32_t>(slot), count * sizeof(int32_t));
    std::memcpy(at<float>(own_weight), at<float>(weight), count * sizeof(float));
    bool good = true;
    for (int64_t i = 0; i < count; ++i) good &= to[i] >= -1 && to[i] < slots;
    return good;
}
