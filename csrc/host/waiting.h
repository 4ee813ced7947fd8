// How a rank waits for others of its host: it spins for some microseconds, then sleeps in the kernel until it is woken,
// and looks every few milliseconds whether who it waits for still runs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace host {

// A rank that ended, or did not arrive before the deadline.
struct PeerError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr std::size_t CACHE_LINE = 64;

inline std::size_t padded(std::size_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

// A counter of one rank that others wait for, in shared memory, alone in its cache line.
struct alignas(CACHE_LINE) Counter {
    std::atomic<std::uint32_t> value;
    std::atomic<std::uint32_t> sleepers;
    std::atomic<std::int32_t> process;  // the rank's

    // Wakes the sleepers. Sequentially consistent: a sleeper either sees the new value or is seen.
    void raise();
    // Sleeps until the value is not `seen`, some milliseconds at most; true if it was those.
    bool sleep(std::uint32_t seen);
};

// The memory that all ranks of a group map: the counter of each, and what they write for one another.
class SharedMemory {
public:
    // Maps `bytes` from the beginning of a file, and writes for the others which process `rank` is.
    SharedMemory(int descriptor, int rank, int size, std::size_t bytes);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    Counter& counter(int rank) const { return counters_[rank]; }
    char* behind_counters() const { return reinterpret_cast<char*>(counters_ + size_); }

private:
    std::size_t bytes_;
    int size_;
    Counter* counters_;
};

namespace waiting {

using Clock = std::chrono::steady_clock;
// A message takes some microseconds where every rank has a core; waiting longer is left to the kernel.
constexpr std::chrono::microseconds SPIN{20};

void relax();
// Throws PeerError if the process has ended or the deadline has passed.
void check(int rank, int process, double waited_s, double timeout_s, bool has_gone);
bool has_ended(int process);

}  // namespace waiting

// Returns once `is_done()`, which can become true only after `counter` was raised. Throws PeerError where `peer`, of
// rank `rank`, has ended, or after `timeout_s`.
template <typename Condition>
void wait_until(Condition&& is_done, Counter& counter, int rank, const Counter& peer, double timeout_s) {
    const auto start = waiting::Clock::now();
    while (waiting::Clock::now() - start < waiting::SPIN) {
        for (int i = 0; i < 16; ++i) {
            if (is_done()) return;
            waiting::relax();
        }
    }
    struct Sleeper {
        Counter& counter;
        explicit Sleeper(Counter& counter) : counter(counter) { counter.sleepers.fetch_add(1); }
        ~Sleeper() { counter.sleepers.fetch_sub(1); }
    } sleeper(counter);
    while (true) {
        const std::uint32_t seen = counter.value.load();
        if (is_done()) return;
        if (!counter.sleep(seen)) continue;
        const bool has_gone = waiting::has_ended(peer.process.load());
        if (is_done()) return;  // work done before its end counts
        const double waited_s = std::chrono::duration<double>(waiting::Clock::now() - start).count();
        waiting::check(rank, peer.process.load(), waited_s, timeout_s, has_gone);
    }
}

}  // namespace host
