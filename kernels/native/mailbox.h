// One direction of one box: where its bytes lie and what a correct peer sends there. Says what comm/mailbox/wire.py says in Python.
//
// The memory is shared with a peer that may write anything at any time: a header is copied once and its copy checked,
// and so are slots. The progress word tells a waiting receiver how much is there already; it is only ever a hint of
// what to fetch early, whatever it says.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

struct Header {
    uint64_t first;  // magic, version, kind, wire type
    uint32_t epoch, sequence, layer;
    uint32_t box[2];  // attention, expert, micro-batch and a spare, 16 bits each
    uint32_t rows;
    uint64_t payload;
};
static_assert(sizeof(Header) == 40, "as struct.Struct('<IHBBIIIHHHHIQ') has it");

// What never changes in a box.
struct Terms {
    uint64_t first, where;
    int64_t row_bytes, choices, scale_bytes, max_rows, layers, slots;  // choices are 0 in a combine
};

// Rows to be sent, with their slots and weights in a dispatch: all rows in order, or those that `index` names.
struct Load {
    const char* x;
    int64_t stride;
    const int32_t* slot;  // as the receiver counts them: `base` is taken off, what is then none of its is -1
    const float* weight;
    const int32_t* index;
    int64_t rows;
    int32_t base;
};

class Mailbox {
   public:
    Mailbox(uintptr_t address, int64_t capacity, uintptr_t progress, const Terms& terms);

    // The whole message, its rows in pieces of which each is announced. Rows must fit; see `fits`.
    void write(const Load& load, uint32_t epoch, uint32_t sequence, uint32_t layer);
    // The header of a message whose rows the caller writes from there on. Rows must fit.
    char* begin(int64_t rows, uint32_t epoch, uint32_t sequence, uint32_t layer);
    bool fits(int64_t rows) const { return rows >= 0 && rows <= terms_.max_rows; }

    // A copy of the header when it is the one of a correct message of that number.
    bool read(uint32_t sequence, Header& header) const;
    // Slots and weights into memory of the receiver's own. False when a slot is none of its.
    bool copy_choices(int64_t rows, int32_t* slot, float* weight) const;
    const char* rows(int64_t count) const { return memory_ + x_offset(count); }

    // Fetches what was announced since the last look, and takes `other`'s lines for writing. True when there was any.
    bool pull(uint32_t quiet, const Mailbox& other);

    const Terms& terms() const { return terms_; }

   private:
    int64_t x_offset(int64_t rows) const;
    int64_t payload(int64_t rows) const;
    void announce(uint32_t sequence, int64_t bytes);
    void write_rows(const Load& load, char* to, uint32_t sequence);

    char* memory_;
    int64_t capacity_;
    std::atomic<uint64_t>* progress_;  // sequence number above, bytes below
    Terms terms_;
    uint32_t pulling_ = 0;
    int64_t pulled_ = 0;
};

// Copies while fetching ahead on both sides: lines come from another core's cache, many at a time.
void copy_ahead(char* to, const char* from, int64_t bytes);
