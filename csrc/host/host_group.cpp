#include "host_group.h"

#include <algorithm>
#include <cstring>

#include "reduce.h"

namespace host {

namespace {

// Below this every rank adds up everything itself; above, each a part, at the price of a second round.
constexpr std::size_t DIRECT_BYTES = 32 * 1024;

// Whether the counter `seen` has reached `wanted`; counters wrap around.
bool has_reached(std::uint32_t seen, std::uint32_t wanted) { return static_cast<std::int32_t>(seen - wanted) >= 0; }

}  // namespace

std::size_t HostGroup::required_bytes(int size, std::size_t slot_bytes) {
    return size * (sizeof(Counter) + 2 * padded(slot_bytes));
}

HostGroup::HostGroup(int descriptor, int rank, int size, std::size_t slot_bytes, double timeout_s)
    : memory_(descriptor, rank, size, required_bytes(size, slot_bytes)), rank_(rank), size_(size),
      slot_bytes_(padded(slot_bytes)), timeout_s_(timeout_s) {}

char* HostGroup::slot(int rank, int stage) const {
    return memory_.behind_counters() + (2 * static_cast<std::size_t>(rank) + stage) * slot_bytes_;
}

std::vector<const void*> HostGroup::slots(int stage, std::size_t offset) const {
    std::vector<const void*> result;
    for (int rank = 0; rank < size_; ++rank) result.push_back(slot(rank, stage) + offset);
    return result;
}

void HostGroup::arrive() {
    ++round_;
    memory_.counter(rank_).raise();
}

void HostGroup::wait_for(int rank) {
    Counter& other = memory_.counter(rank);
    wait_until([&] { return has_reached(other.value.load(), round_); }, other, rank, other, timeout_s_);
}

void HostGroup::wait_for_all() {
    for (int i = 1; i < size_; ++i) wait_for((rank_ + i) % size_);
}

void HostGroup::all_reduce(void* data, std::size_t count, DType dtype, Operation operation) {
    const std::size_t item = item_bytes(dtype);
    const std::size_t chunk = slot_bytes_ / item;
    char* const bytes = static_cast<char*>(data);
    for (std::size_t begin = 0; begin < count; begin += chunk) {
        const std::size_t length = std::min(chunk, count - begin);
        char* const own = bytes + begin * item;
        const int stage = round_ % 2;
        std::memcpy(slot(rank_, stage), own, length * item);
        arrive();
        wait_for_all();
        const bool is_direct = length * item <= DIRECT_BYTES;
        const std::size_t first = is_direct ? 0 : length * rank_ / size_;
        const std::size_t last = is_direct ? length : length * (rank_ + 1) / size_;
        reduce(own + first * item, slots(stage, first * item), last - first, dtype, operation);
        if (is_direct) continue;
        // The second round, in the other slots: every rank's part of the result.
        std::memcpy(slot(rank_, 1 - stage), own + first * item, (last - first) * item);
        arrive();
        for (int i = 1; i < size_; ++i) {
            const int rank = (rank_ + i) % size_;
            wait_for(rank);
            const std::size_t from = length * rank / size_, to = length * (rank + 1) / size_;
            std::memcpy(own + from * item, slot(rank, 1 - stage), (to - from) * item);
        }
    }
}

void HostGroup::reduce_scatter(const void* input, void* output, std::size_t count, DType dtype, Operation operation) {
    const std::size_t item = item_bytes(dtype);
    const std::size_t chunk = std::max<std::size_t>(slot_bytes_ / item / size_, 1);
    const char* const in = static_cast<const char*>(input);
    char* const out = static_cast<char*>(output);
    for (std::size_t begin = 0; begin < count; begin += chunk) {
        const std::size_t length = std::min(chunk, count - begin);
        const int stage = round_ % 2;
        for (int part = 0; part < size_; ++part)
            std::memcpy(slot(rank_, stage) + part * length * item, in + (part * count + begin) * item, length * item);
        arrive();
        wait_for_all();
        reduce(out + begin * item, slots(stage, rank_ * length * item), length, dtype, operation);
    }
}

void HostGroup::all_gather(const void* input, void* output, std::size_t bytes) {
    const char* const in = static_cast<const char*>(input);
    char* const out = static_cast<char*>(output);
    for (std::size_t begin = 0; begin < bytes; begin += slot_bytes_) {
        const std::size_t length = std::min(slot_bytes_, bytes - begin);
        const int stage = round_ % 2;
        std::memcpy(slot(rank_, stage), in + begin, length);
        arrive();
        for (int i = 0; i < size_; ++i) {
            const int rank = (rank_ + i) % size_;
            if (rank != rank_) wait_for(rank);
            std::memcpy(out + rank * bytes + begin, slot(rank, stage), length);
        }
    }
}

void HostGroup::broadcast(void* data, std::size_t bytes, int root) {
    char* const own = static_cast<char*>(data);
    for (std::size_t begin = 0; begin < bytes; begin += slot_bytes_) {
        const std::size_t length = std::min(slot_bytes_, bytes - begin);
        const int stage = round_ % 2;
        if (rank_ == root) std::memcpy(slot(root, stage), own + begin, length);
        arrive();
        // Everyone waits for everyone, as in all other collectives: what makes it safe to use slots in turns.
        wait_for_all();
        if (rank_ != root) std::memcpy(own + begin, slot(root, stage), length);
    }
}

void HostGroup::barrier() {
    arrive();
    wait_for_all();
}

}  // namespace host
