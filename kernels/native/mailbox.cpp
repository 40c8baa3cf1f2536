#include "mailbox.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "past_caches.h"

namespace {

constexpr int64_t kHeader = 64;
constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 1024;             // bytes; 512 to 4096 did alike
constexpr int64_t kPiece = 16384;            // bytes; 4 to 64 KiB did alike
constexpr int64_t kLongestPull = 1 << 20;    // a longer message no longer fits a core's second-level cache twice

int64_t aligned(int64_t count) { return (count + kLine - 1) / kLine * kLine; }

void fetch(const char* at) { __builtin_prefetch(at, 0, 2); }

void fetch_to_write(const char* at) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*at));  // a hint; without it the compiler would ask for a plain read
#else
    __builtin_prefetch(at, 1, 2);
#endif
}

}  // namespace

void copy_ahead(char* to, const char* from, int64_t bytes) {
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
        fetch(from + at + kAhead);
        fetch_to_write(to + at + kAhead);
        std::memcpy(to + at, from + at, kLine);
    }
    std::memcpy(to + at, from + at, bytes - at);
}

Mailbox::Mailbox(uintptr_t address, int64_t capacity, uintptr_t progress, const Terms& terms)
    : memory_(reinterpret_cast<char*>(address)),
      capacity_(capacity),
      progress_(reinterpret_cast<std::atomic<uint64_t>*>(progress)),
      terms_(terms) {
    if (address == 0 || progress == 0 || progress % 8 != 0) throw std::invalid_argument("a mailbox needs aligned memory");
    if (terms.max_rows < 0 || kHeader + payload(terms.max_rows) > capacity)
        throw std::invalid_argument("a mailbox smaller than its largest message");
}

int64_t Mailbox::x_offset(int64_t rows) const {
    return kHeader + aligned(rows * (8 * terms_.choices + terms_.scale_bytes));
}

int64_t Mailbox::payload(int64_t rows) const { return x_offset(rows) - kHeader + rows * terms_.row_bytes; }

void Mailbox::announce(uint32_t sequence, int64_t bytes) {
    progress_->store(uint64_t{sequence} << 32 | static_cast<uint64_t>(bytes), std::memory_order_release);
}

char* Mailbox::begin(int64_t rows, uint32_t epoch, uint32_t sequence, uint32_t layer) {
    Header header{terms_.first, epoch, sequence, layer, {}, static_cast<uint32_t>(rows),
                  static_cast<uint64_t>(payload(rows))};
    std::memcpy(header.box, &terms_.where, sizeof header.box);
    std::memcpy(memory_, &header, sizeof header);
    return memory_ + x_offset(rows);
}

void Mailbox::write(const Load& load, uint32_t epoch, uint32_t sequence, uint32_t layer) {
    char* to = begin(load.rows, epoch, sequence, layer);
    auto* weight = reinterpret_cast<float*>(memory_ + kHeader);
    auto* slot = reinterpret_cast<int32_t*>(memory_ + kHeader + 4 * terms_.choices * load.rows);
    for (int64_t r = 0; r < load.rows && terms_.choices; ++r) {
        int64_t from = (load.index ? load.index[r] : r) * terms_.choices;
        std::memcpy(weight + r * terms_.choices, load.weight + from, terms_.choices * sizeof(float));
        for (int64_t k = 0; k < terms_.choices; ++k) {
            int64_t here = int64_t{load.slot[from + k]} - load.base;
            slot[r * terms_.choices + k] = here >= 0 && here < terms_.slots ? static_cast<int32_t>(here) : -1;
        }
    }
    write_rows(load, to, sequence);
}

void Mailbox::write_rows(const Load& load, char* to, uint32_t sequence) {
    int64_t size = terms_.row_bytes, from = x_offset(load.rows);
    bool past = load.rows * size > kPiece && past_caches();
    bool tells = !past && load.rows * size > kPiece && from + load.rows * size <= kLongestPull;
    bool whole = !load.index && load.stride == size;
    int64_t step = whole ? load.rows : 1, done = 0, told = 0;
    int64_t piece = whole ? kPiece : step * size;
    for (int64_t r = 0; r < load.rows; r += step) {
        const char* row = load.x + (load.index ? load.index[r] : r) * load.stride;
        for (int64_t at = 0; at < step * size; at += piece) {
            int64_t bytes = std::min(piece, step * size - at);
            past ? copy_past_caches(to + done, row + at, bytes) : copy_ahead(to + done, row + at, bytes);
            done += bytes;
            if (!tells || done - told < kPiece) continue;
            announce(sequence, from + done);
            told = done;
        }
    }
    if (past) settle_past_caches();
}

bool Mailbox::read(uint32_t sequence, Header& header) const {
    std::memcpy(&header, memory_, sizeof header);
    uint64_t where;
    std::memcpy(&where, header.box, sizeof where);
    return header.first == terms_.first && where == terms_.where && header.sequence == sequence &&
           header.layer < static_cast<uint64_t>(terms_.layers) && fits(header.rows) &&
           header.payload == static_cast<uint64_t>(payload(header.rows));
}

bool Mailbox::copy_choices(int64_t rows, int32_t* slot, float* weight) const {
    int64_t count = rows * terms_.choices;
    std::memcpy(weight, memory_ + kHeader, count * sizeof(float));
    std::memcpy(slot, memory_ + kHeader + 4 * count, count * sizeof(int32_t));
    bool good = true;
    for (int64_t i = 0; i < count; ++i) good &= slot[i] >= -1 && slot[i] < terms_.slots;
    if (!good) std::fill(slot, slot + count, -1);
    return good;
}

bool Mailbox::pull(uint32_t quiet, const Mailbox& other) {
    uint64_t told = progress_->load(std::memory_order_acquire);
    auto sequence = static_cast<uint32_t>(told >> 32);
    int64_t to = std::min<int64_t>({static_cast<uint32_t>(told), capacity_, kLongestPull});
    if (sequence == quiet) return false;
    if (sequence != pulling_) {
        pulling_ = sequence;
        pulled_ = 0;
    }
    if (to <= pulled_) return false;
    for (int64_t at = pulled_; at < to; at += kLine) {
        fetch(memory_ + at);
        if (at < other.capacity_) fetch_to_write(other.memory_ + at);
    }
    pulled_ = to;
    return true;
}
