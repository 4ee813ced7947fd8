#include "waiting.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

namespace host {

namespace {

constexpr std::chrono::milliseconds LOOK_EVERY{20};

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
    static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

SharedMemory::SharedMemory(int descriptor, int rank, int size, std::size_t bytes)
    : bytes_(bytes), size_(size) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) throw std::runtime_error(std::string("cannot map shared memory: ") + std::strerror(errno));
    counters_ = static_cast<Counter*>(memory);
    counter(rank).process.store(getpid());
}

SharedMemory::~SharedMemory() { munmap(counters_, bytes_); }

void Counter::raise() {
    value.fetch_add(1);
    if (sleepers.load() > 0) futex(value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Counter::sleep(std::uint32_t seen) {
    const timespec pause{0, std::chrono::nanoseconds(LOOK_EVERY).count()};
    return futex(value, FUTEX_WAIT, seen, &pause) != 0 && errno == ETIMEDOUT;
}

namespace waiting {

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool has_ended(int process) {
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
    if (descriptor < 0) return errno == ESRCH;
    pollfd end{descriptor, POLLIN, 0};  // readable once the process has ended, reaped or not
    const bool result = poll(&end, 1, 0) > 0;
    close(descriptor);
    return result;
}

void check(int rank, int process, double waited_s, double timeout_s, bool has_gone) {
    if (!has_gone && waited_s <= timeout_s) return;
    throw PeerError("rank " + std::to_string(rank) + " of the group (process " + std::to_string(process) + ") " +
                    (has_gone ? "has ended" : "did not come in " + std::to_string(timeout_s) + " s"));
}

}  // namespace waiting

}  // namespace host
