#include "flags.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <stdexcept>

#if defined(__linux__)
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kBellsAtOnce = 128;        // FUTEX_WAITV_MAX
constexpr int64_t kLongestSpin = 400000;  // ns: a layer of the other side is shorter (AMD EPYC); a wake-up costs about 50 us
constexpr int64_t kShortestSpin = 2000;   // ns
constexpr int64_t kBeforeYield = 4000;    // ns of pause instructions before the core is offered to others
constexpr int64_t kTakenAway = 20000;     // ns that a yield may take before the cores count as contended
constexpr uint32_t kLate = 1 << 16;       // dispatches that may have been given up since the one whose answer comes now
constexpr int64_t kLook = 2000;           // ns between two looks at files while spinning: a system call takes some 300
constexpr int kDoorAt = 8;                // words behind the bell; see comm/mailbox/segment.py
constexpr uint32_t kInFiles = 1 << 16;    // of a bell's sleepers: one that sleeps in files; below it are those on the bell
constexpr int kShyWaits = 64;            // waits without a spin after that, at most: one at first, twice as many each time

int64_t since(FlagBoard::Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(FlagBoard::Clock::now() - start).count();
}

void pause_briefly() {
    for (int i = 0; i < 4; ++i) {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
}

void nap(int64_t ns) {
    timespec span{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    nanosleep(&span, nullptr);
}

#if defined(__linux__)
#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
struct WaitOne {  // struct futex_waitv of <linux/futex.h>, since Linux 5.16
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};
constexpr uint32_t kWord32 = 2;  // FUTEX_32, not private
#endif

void wake(Word* bell) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)bell;
#endif
}

// Sleeps until a bell leaves its count, a signal comes, or `ns` are over. Returns false on a signal.
bool sleep_on(const std::vector<Word*>& bells, const std::vector<uint32_t>& counts, int64_t ns) {
#if defined(__linux__)
    if (bells.size() == 1) {
        timespec span{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
        long rc = syscall(SYS_futex, reinterpret_cast<uint32_t*>(bells[0]), FUTEX_WAIT, counts[0], &span, nullptr, 0);
        return rc == 0 || errno != EINTR;
    }
    if (bells.size() <= kBellsAtOnce) {
        std::vector<WaitOne> all;
        for (size_t i = 0; i < bells.size(); ++i)
            all.push_back({counts[i], reinterpret_cast<uint64_t>(bells[i]), kWord32, 0});
        timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        int64_t end = until.tv_sec * int64_t{1000000000} + until.tv_nsec + ns;
        until = {static_cast<time_t>(end / 1000000000), static_cast<long>(end % 1000000000)};
        long rc = syscall(SYS_futex_waitv, all.data(), all.size(), 0, &until, CLOCK_MONOTONIC);
        if (rc >= 0 || errno != ENOSYS) return rc >= 0 || errno != EINTR;
    }
#endif
    (void)bells;
    (void)counts;
    nap(std::min<int64_t>(ns, 200000));
    return true;
}

// Whether something is ready there; waits at most `ns` for it. False on a signal too.
bool ready(int files, int64_t ns) {
#if defined(__linux__)
    epoll_event first;
    if (ns == 0) return epoll_wait(files, &first, 1, 0) > 0;
    pollfd one{files, POLLIN, 0};
    timespec span{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
    return ppoll(&one, 1, &span, nullptr) > 0;
#else
    (void)files;
    nap(ns);
    return false;
#endif
}

Word* word(uintptr_t address) {
    if (address == 0 || address % 4 != 0) throw std::invalid_argument("a flag word needs an aligned address");
    return reinterpret_cast<Word*>(address);
}

}  // namespace

FlagBoard::FlagBoard(const std::vector<Addresses>& lanes, const std::vector<uintptr_t>& bells, bool spins)
    : usual_(kLongestSpin / 4), budget_(kLongestSpin / 2), spins_(spins) {
    for (auto [incoming, outgoing, bell] : lanes)
        lanes_.push_back({word(incoming), word(outgoing), word(bell), word(bell + 4), 0, {}});
    for (uintptr_t bell : bells) {
        bells_.push_back(word(bell));
        sleepers_.push_back(word(bell + 4));
    }
    counts_.resize(bells_.size());
}

void FlagBoard::post(size_t lane, uint32_t value) {
    Lane& to = lanes_.at(lane);
    to.sent = value;
    to.outgoing->store(value, std::memory_order_release);
    to.bell->fetch_add(1);
    uint32_t sleepers = to.sleepers->load();
    if (sleepers == 0) return;
    if (sleepers >= kInFiles) knocker_.knock(to.bell[kDoorAt].load());
    if (sleepers % kInFiles != 0 && !(to.core && to.core.guest_wakes())) wake(to.bell);
}

void FlagBoard::lend(uintptr_t own, uintptr_t peer) {
    if (bells_.size() != 1 || bells_[0] != word(own))
        throw std::invalid_argument("an end lends its core where it has one bell");
    own_ = LentCore(own);
    for (Lane& lane : lanes_)
        if (lane.bell == word(peer)) lane.core = LentCore(peer);
}

std::vector<size_t> FlagBoard::changed(const std::vector<size_t>& which) const {
    std::vector<size_t> found;
    for (size_t lane : which)
        if (fresh(lane)) found.push_back(lane);
    return found;
}

std::vector<size_t> FlagBoard::wait(const std::vector<size_t>& which, double timeout) {
    std::vector<size_t> found = changed(which);
    if (!found.empty() || timeout <= 0) return found;
    auto start = Clock::now();
    auto limit = static_cast<int64_t>(std::min(timeout, 3600.0) * 1e9);
    if (!spin(which, start, limit)) {
        if (files_ < 0)
            park(which, start, limit);
        else
            park_in_files(which, start, limit);
    }
    learn(since(start));
    return changed(which);
}

void FlagBoard::carry(size_t lane, Mailbox& out, Mailbox& in, uintptr_t own_slot, uintptr_t own_weight,
                      uint32_t sent) {
    Lane& with = lanes_.at(lane);
    if (in.terms().choices && (own_slot == 0 || own_weight == 0))
        throw std::invalid_argument("slots that come in need memory of this end's own");
    with.out = &out;
    with.in = &in;
    with.sent = sent;
    with.own_slot = reinterpret_cast<int32_t*>(own_slot);
    with.own_weight = reinterpret_cast<float*>(own_weight);
}

const Mailbox& FlagBoard::out(size_t lane) const {
    const Lane& at = lanes_.at(lane);
    if (!at.out) throw std::invalid_argument("this lane carries no mailboxes");
    return *at.out;
}

const Mailbox& FlagBoard::in(size_t lane) const {
    const Lane& at = lanes_.at(lane);
    if (!at.in) throw std::invalid_argument("this lane carries no mailboxes");
    return *at.in;
}

uint32_t FlagBoard::send(size_t lane, const Load& load, uint32_t number, uint32_t epoch, uint32_t layer) {
    if (!out(lane).fits(load.rows))
        throw std::invalid_argument(std::to_string(load.rows) + " rows in one message, at most " +
                                    std::to_string(out(lane).terms().max_rows));
    Lane& to = lanes_[lane];
    to.out->write(load, epoch, number, layer);
    if (to.out->terms().choices) to.quiet = value(lane);
    post(lane, number);
    return to.quiet;
}

Taken FlagBoard::take(size_t lane) {
    Taken taken = look(lane);
    lanes_[lane].quiet = taken.number;
    return taken;
}

Taken FlagBoard::look(size_t lane) const {
    const Lane& from = lanes_.at(lane);
    if (!from.in) throw std::invalid_argument("this lane carries no mailboxes");
    Taken taken{};
    taken.number = value(lane);
    taken.good = from.in->read(taken.number, taken.header);
    if (taken.good && from.in->terms().choices)
        taken.good = from.in->copy_choices(taken.header.rows, from.own_slot, from.own_weight);
    return taken;
}

Task FlagBoard::begin(size_t lane, const Taken& found) {
    Lane& on = lanes_.at(lane);
    const Header& asked = found.header;
    on.quiet = found.number;
    const Terms& terms = on.in->terms();
    char* out = on.out->begin(asked.rows, asked.epoch, found.number, asked.layer);
    return {on.in->rows(asked.rows), on.own_slot, on.own_weight, asked.rows, terms.row_bytes, terms.choices, out};
}

bool FlagBoard::fresh(size_t lane) const {
    const Lane& on = lanes_.at(lane);
    uint32_t now = on.incoming->load(std::memory_order_acquire);
    if (now == on.quiet) return false;
    bool asks = on.out && on.out->terms().choices;
    return !asks || now == on.sent || on.sent - now >= kLate;
}

bool FlagBoard::any(const std::vector<size_t>& which) const {
    return std::any_of(which.begin(), which.end(), [&](size_t lane) { return fresh(lane); });
}

// Fetches what peers say is there of the next message. True when there was something.
bool FlagBoard::pull(const std::vector<size_t>& which) {
    bool found = false;
    for (size_t i : which) {
        Lane& lane = lanes_[i];
        if (lane.in) found |= lane.in->pull(lane.quiet, *lane.out);
    }
    return found;
}

// True when a flag changed within the budget, or something is ready in the files.
bool FlagBoard::spin(const std::vector<size_t>& which, Clock::time_point start, int64_t limit) {
    if (!spins_) return false;
    if (shy_ > 0) {
        --shy_;
        return false;
    }
    int64_t budget = std::min(budget_, limit), quiet_since = 0, looked = 0;
    for (int64_t spent = 0; spent < budget; spent = since(start)) {
        if (any(which)) {
            shyness_ /= 2;
            return true;
        }
        if (guest_waits()) return any(which);
        if (files_ >= 0 && spent - looked >= kLook) {
            looked = spent;
            if (ready(files_, 0) && !(take_knock(door_) && !ready(files_, 0))) return true;
        }
        if (pull(which)) quiet_since = spent;
        pause_briefly();
        if (spent - quiet_since > kBeforeYield && !offer_core()) return any(which);
    }
    return any(which);
}

// Lets another runnable thread have this core. False when one took it for long: spinning would be in its way.
bool FlagBoard::offer_core() {
#if defined(__linux__)
    auto before = Clock::now();
    sched_yield();
    if (since(before) > kTakenAway) {
        shy_ = shyness_ = std::clamp(2 * shyness_, 1, kShyWaits);
        return false;
    }
#endif
    return true;
}

void FlagBoard::park(const std::vector<size_t>& which, Clock::time_point start, int64_t limit) {
    for (Word* sleepers : sleepers_) sleepers->fetch_add(1);
    while (true) {
        for (size_t i = 0; i < bells_.size(); ++i) counts_[i] = bells_[i]->load();
        int64_t left = limit - since(start);
        if (any(which) || left <= 0) break;
        if (own_) own_.lend(counts_[0]);
        if (!sleep_on(bells_, counts_, left)) break;
    }
    if (own_) own_.take_back();
    for (Word* sleepers : sleepers_) sleepers->fetch_sub(1);
}

// As `park`, in place of the bell in the files. Knocks are taken before the flags are looked at: who knocked has written.
void FlagBoard::park_in_files(const std::vector<size_t>& which, Clock::time_point start, int64_t limit) {
    for (Word* sleepers : sleepers_) sleepers->fetch_add(kInFiles);
    while (true) {
        for (size_t i = 0; i < bells_.size(); ++i) counts_[i] = bells_[i]->load();  // who rings after this knocks
        int64_t left = limit - since(start);
        if (any(which) || left <= 0 || !ready(files_, left)) break;
        take_knock(door_);
        if (any(which) || ready(files_, 0)) break;
    }
    for (Word* sleepers : sleepers_) sleepers->fetch_sub(kInFiles);
}

void FlagBoard::watch(int files, int door) {
    files_ = files;
    door_ = door;
}

// The budget is twice the usual wait, or next to nothing where the usual wait is long.
void FlagBoard::learn(int64_t waited) {
    usual_ += (std::min(waited, 10 * kLongestSpin) - usual_) / 8;
    budget_ = usual_ < kLongestSpin ? std::clamp(2 * usual_, kShortestSpin, kLongestSpin) : kShortestSpin;
}
