// Flag words in memory that processes share: publish after data, see that one changed, spin briefly, park on a futex.
//
// A lane has an incoming word, an outgoing word and its peer's bell; an end has its own bells. A bell is two words, a
// count and the number of sleepers. The poster writes its flag (release), adds to the bell, then reads the sleepers; the
// waiter adds itself to the sleepers, reads the bell, looks at the flags again and sleeps only while the bell still has
// that count. All four bell accesses are sequentially consistent, so one of the two always sees the other.
//
// A waiter that also waits for files (connections) sleeps in those. It counts itself among the sleepers as such, by
// kInFiles, and whoever rings its bell then knocks at its door: a datagram socket whose number stands behind the bell, and
// which is one of those files. Nothing else differs, so one of the two still always sees the other.
//
// Where two ends lend each other their cores (lent_core.h), a waiter whose core is wanted does not spin.
//
// A lane that carries mailboxes moves whole messages in one call, and a spinning waiter fetches what it is told of.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <tuple>
#include <vector>

#include "door.h"
#include "lent_core.h"
#include "mailbox.h"

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "flag words must be plain 32-bit words");

// What came in; `good` is whether all of it is what a correct peer sends.
struct Taken {
    bool good;
    uint32_t number;
    Header header;
};

// One dispatch for whoever computes it: its rows where they lie, its slots and weights in memory of this end's own, and
// where the rows of the answer go.
struct Task {
    const char* x;
    const int32_t* slot;
    const float* weight;
    int64_t rows, row_bytes, choices;
    char* out;
};

class FlagBoard {
   public:
    using Addresses = std::tuple<uintptr_t, uintptr_t, uintptr_t>;
    using Clock = std::chrono::steady_clock;

    // Without `spins` a wait parks at once: for words that another thread of this process writes.
    FlagBoard(const std::vector<Addresses>& lanes, const std::vector<uintptr_t>& bells, bool spins);

    uint32_t value(size_t lane) const { return lanes_.at(lane).incoming->load(std::memory_order_acquire); }
    // From now on a change is another value than `quiet`.
    void settle(size_t lane, uint32_t quiet) { lanes_.at(lane).quiet = quiet; }
    void post(size_t lane, uint32_t value);
    std::vector<size_t> changed(const std::vector<size_t>& which) const;
    std::vector<size_t> wait(const std::vector<size_t>& which, double timeout);
    int64_t spin_budget() const { return budget_; }

    // The lane's mailboxes, memory of this end's own for the slots and weights of what comes in (0 in a combine), and the
    // number sent last. From then on the late answer to a dispatch that was given up is no change.
    void carry(size_t lane, Mailbox& out, Mailbox& in, uintptr_t own_slot, uintptr_t own_weight, uint32_t sent);
    // Writes and posts. Returns the lane's quiet value: who sends a dispatch waits for nothing that was there before.
    uint32_t send(size_t lane, const Load& load, uint32_t number, uint32_t epoch, uint32_t layer);
    // Whatever came counts as taken.
    Taken take(size_t lane);
    // The same, but it is still there.
    Taken look(size_t lane) const;
    // A dispatch that `look` found good counts as taken, and its answer begins; `post` ends it.
    Task begin(size_t lane, const Taken& found);
    const Mailbox& out(size_t lane) const;
    const Mailbox& in(size_t lane) const;
    // Of what was sent last, and what was taken last.
    uint32_t sent(size_t lane) const { return lanes_.at(lane).sent; }
    uint32_t taken(size_t lane) const { return lanes_.at(lane).quiet; }

    // A wait that finds a guest lends this end's core, whose bell is `own`; it must be the only one. The owner of the bell
    // `peer` lends its core too, so its guest may wake it.
    void lend(uintptr_t own, uintptr_t peer);

    // From now on a wait also ends, with nothing, when something is ready in `files`, an epoll. `door` is one of its files.
    void watch(int files, int door);

   private:
    struct Lane {
        Word* incoming;
        Word* outgoing;
        Word* bell;
        Word* sleepers;
        uint32_t quiet;
        LentCore core = {};  // the peer's
        uint32_t sent = 0;
        Mailbox* out = nullptr;
        Mailbox* in = nullptr;
        int32_t* own_slot = nullptr;
        float* own_weight = nullptr;
    };

    bool fresh(size_t lane) const;
    bool any(const std::vector<size_t>& which) const;
    bool pull(const std::vector<size_t>& which);
    bool spin(const std::vector<size_t>& which, Clock::time_point start, int64_t limit);
    bool offer_core();
    bool guest_waits() const { return own_ && own_.is_wanted(); }
    void park(const std::vector<size_t>& which, Clock::time_point start, int64_t limit);
    void park_in_files(const std::vector<size_t>& which, Clock::time_point start, int64_t limit);
    void learn(int64_t waited);

    std::vector<Lane> lanes_;
    std::vector<Word*> bells_;
    std::vector<Word*> sleepers_;
    std::vector<uint32_t> counts_;
    int64_t usual_;   // ns
    int64_t budget_;  // ns
    int shy_ = 0;      // waits left without a spin
    int shyness_ = 0;  // how many there were last
    bool spins_;
    int files_ = -1;
    int door_ = -1;
    Knocker knocker_;
    LentCore own_;  // what this end lends
};
