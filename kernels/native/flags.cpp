// Flag words in memory that processes share: publish after data, see that one changed, spin briefly, park on a futex.
//
// A lane has an incoming word, an outgoing word and its peer's bell; an end has its own bells. A bell is two words, a
// count and the number of sleepers. The poster writes its flag (release), adds to the bell, then reads the sleepers; the
// waiter adds itself to the sleepers, reads the bell, looks at the flags again and sleeps only while the bell still has
// that count. All four bell accesses are sequentially consistent, so one of the two always sees the other.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <tuple>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace py = pybind11;

namespace {

using Word = std::atomic<uint32_t>;
using Clock = std::chrono::steady_clock;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "flag words must be plain 32-bit words");

constexpr int kBellsAtOnce = 128;        // FUTEX_WAITV_MAX
constexpr int64_t kLongestSpin = 100000;  // ns; beyond it a wake-up (about 50 us) costs less than it saves
constexpr int64_t kShortestSpin = 2000;   // ns
constexpr int64_t kBeforeYield = 4000;    // ns of pause instructions before the core is offered to others
constexpr int64_t kTakenAway = 20000;     // ns that a yield may take before the cores count as contended
constexpr int kShyWaits = 64;            // waits without a spin after that

int64_t since(Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
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

class FlagBoard {
   public:
    using Addresses = std::tuple<uintptr_t, uintptr_t, uintptr_t>;

    // Without `spins` a wait parks at once: for words that another thread of this process writes.
    FlagBoard(const std::vector<Addresses>& lanes, const std::vector<uintptr_t>& bells, bool spins) : spins_(spins) {
        for (auto [incoming, outgoing, bell] : lanes)
            lanes_.push_back({word(incoming), word(outgoing), word(bell), word(bell + 4), 0});
        for (uintptr_t bell : bells) {
            bells_.push_back(word(bell));
            sleepers_.push_back(word(bell + 4));
        }
        counts_.resize(bells_.size());
    }

    uint32_t value(size_t lane) const { return lanes_.at(lane).incoming->load(std::memory_order_acquire); }

    void settle(size_t lane, uint32_t quiet) { lanes_.at(lane).quiet = quiet; }

    void post(size_t lane, uint32_t value) {
        Lane& to = lanes_.at(lane);
        to.outgoing->store(value, std::memory_order_release);
        to.bell->fetch_add(1);
        if (to.sleepers->load() != 0) wake(to.bell);
    }

    std::vector<size_t> changed(const std::vector<size_t>& which) const {
        std::vector<size_t> found;
        for (size_t lane : which)
            if (value(lane) != lanes_[lane].quiet) found.push_back(lane);
        return found;
    }

    std::vector<size_t> wait(const std::vector<size_t>& which, double timeout) {
        std::vector<size_t> found = changed(which);
        if (!found.empty() || timeout <= 0) return found;
        py::gil_scoped_release release;
        auto start = Clock::now();
        auto limit = static_cast<int64_t>(std::min(timeout, 3600.0) * 1e9);
        if (!spin(which, start, limit)) park(which, start, limit);
        learn(since(start));
        return changed(which);
    }

    int64_t spin_budget() const { return budget_; }

   private:
    struct Lane {
        Word* incoming;
        Word* outgoing;
        Word* bell;
        Word* sleepers;
        uint32_t quiet;
    };

    static Word* word(uintptr_t address) {
        if (address == 0 || address % 4 != 0) throw std::invalid_argument("a flag word needs an aligned address");
        return reinterpret_cast<Word*>(address);
    }

    bool any(const std::vector<size_t>& which) const {
        return std::any_of(which.begin(), which.end(), [&](size_t i) { return value(i) != lanes_[i].quiet; });
    }

    // True when a flag changed within the budget.
    bool spin(const std::vector<size_t>& which, Clock::time_point start, int64_t limit) {
        if (!spins_) return false;
        if (shy_ > 0) {
            --shy_;
            return false;
        }
        int64_t budget = std::min(budget_, limit);
        for (int64_t spent = 0; spent < budget; spent = since(start)) {
            if (any(which)) return true;
            pause_briefly();
            if (spent > kBeforeYield && !offer_core()) return any(which);
        }
        return any(which);
    }

    // Lets another runnable thread have this core. False when one took it for long: spinning would be in its way.
    bool offer_core() {
#if defined(__linux__)
        auto before = Clock::now();
        sched_yield();
        if (since(before) > kTakenAway) {
            shy_ = kShyWaits;
            return false;
        }
#endif
        return true;
    }

    void park(const std::vector<size_t>& which, Clock::time_point start, int64_t limit) {
        for (Word* sleepers : sleepers_) sleepers->fetch_add(1);
        while (true) {
            for (size_t i = 0; i < bells_.size(); ++i) counts_[i] = bells_[i]->load();
            int64_t left = limit - since(start);
            if (any(which) || left <= 0 || !sleep_on(bells_, counts_, left)) break;
        }
        for (Word* sleepers : sleepers_) sleepers->fetch_sub(1);
    }

    // The budget is twice the usual wait, or next to nothing where the usual wait is long.
    void learn(int64_t waited) {
        usual_ += (std::min(waited, 10 * kLongestSpin) - usual_) / 8;
        budget_ = usual_ < kLongestSpin ? std::clamp(2 * usual_, kShortestSpin, kLongestSpin) : kShortestSpin;
    }

    std::vector<Lane> lanes_;
    std::vector<Word*> bells_;
    std::vector<Word*> sleepers_;
    std::vector<uint32_t> counts_;
    int64_t usual_ = kLongestSpin / 4;
    int64_t budget_ = kLongestSpin / 2;
    int shy_ = 0;
    bool spins_;
};

}  // namespace

void bind_m2n(py::module_& module);  // m2n.cpp

void bind_flags(py::module_& module) {
    bind_m2n(module);
    module.attr("data_plane") = 2;  // what comm/native.py expects; raise both when a signature changes
    py::class_<FlagBoard>(module, "FlagBoard", "Flag words of all lanes of one end; see comm/flags.py.")
        .def(py::init<const std::vector<FlagBoard::Addresses>&, const std::vector<uintptr_t>&, bool>(), py::arg("lanes"),
             py::arg("bells"), py::arg("spins") = true)
        .def("value", &FlagBoard::value)
        .def("settle", &FlagBoard::settle)
        .def("post", &FlagBoard::post)
        .def("changed", &FlagBoard::changed)
        .def("wait", &FlagBoard::wait)
        .def_property_readonly("spin_budget", &FlagBoard::spin_budget);
}
