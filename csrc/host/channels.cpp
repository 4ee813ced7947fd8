#include "channels.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace host {

namespace {

// The receiver begins to copy while the sender goes on.
constexpr std::size_t PIECE_BYTES = 128 * 1024;
using Size = std::uint64_t;  // precedes every message

}  // namespace

// One writes, one reads. Counters are of bytes and wrap around.
struct Channels::Ring {
    alignas(CACHE_LINE) std::atomic<std::uint32_t> written;
    std::uint32_t origin;  // the count at the first byte of the memory
    std::atomic<std::uint32_t> wants_room;  // the writer waits for the reader
    alignas(CACHE_LINE) std::atomic<std::uint32_t> read;

    char* bytes() { return reinterpret_cast<char*>(this + 1); }

    // An empty ring begins anew: one that is never full takes and touches little memory. The reader looks at the
    // origin only while there is something to read.
    std::uint32_t room(std::size_t capacity) {
        const std::uint32_t begin = written.load(std::memory_order_relaxed), end = read.load();
        if (begin == end) origin = begin;
        return static_cast<std::uint32_t>(capacity) - (begin - end);
    }

    std::uint32_t filled() const { return written.load() - read.load(std::memory_order_relaxed); }

    void put(const void* data, std::size_t bytes, std::size_t capacity) {
        const std::uint32_t at = written.load(std::memory_order_relaxed);
        const std::size_t first = at_most_to_end(at, bytes, capacity);
        std::memcpy(this->bytes() + place(at, capacity), data, first);
        std::memcpy(this->bytes(), static_cast<const char*>(data) + first, bytes - first);
        written.store(at + static_cast<std::uint32_t>(bytes));
    }

    void take(void* data, std::size_t bytes, std::size_t capacity) {
        const std::uint32_t at = read.load(std::memory_order_relaxed);
        const std::size_t first = at_most_to_end(at, bytes, capacity);
        std::memcpy(data, this->bytes() + place(at, capacity), first);
        std::memcpy(static_cast<char*>(data) + first, this->bytes(), bytes - first);
        read.store(at + static_cast<std::uint32_t>(bytes));
    }

private:
    std::size_t place(std::uint32_t at, std::size_t capacity) const { return (at - origin) % capacity; }
    std::size_t at_most_to_end(std::uint32_t at, std::size_t bytes, std::size_t capacity) const {
        return std::min(bytes, capacity - place(at, capacity));
    }
};

std::size_t Channels::required_bytes(int size, std::size_t ring_bytes) {
    return size * (sizeof(Counter) + size * (sizeof(Ring) + ring_bytes));
}

Channels::Channels(int descriptor, int rank, int size, std::size_t ring_bytes)
    : ring_bytes_(ring_bytes), mapped_bytes_(required_bytes(size, ring_bytes)), rank_(rank), size_(size), peers_(size),
      memory_(map_shared(descriptor, mapped_bytes_)) {
    counter(rank_).process.store(getpid());
}

Channels::~Channels() { munmap(memory_, mapped_bytes_); }

Counter& Channels::counter(int rank) const { return reinterpret_cast<Counter*>(memory_)[rank]; }

Channels::Ring& Channels::ring(int from, int to) const {
    const std::size_t index = static_cast<std::size_t>(from) * size_ + to;
    return *reinterpret_cast<Ring*>(memory_ + size_ * sizeof(Counter) + index * (sizeof(Ring) + ring_bytes_));
}

std::uint64_t Channels::send(const void* data, std::size_t bytes, int to) {
    Peer& peer = peers_.at(to);
    peer.sends.push_back({static_cast<const char*>(data), bytes, false});
    const std::uint64_t number = peer.sent + peer.sends.size() - 1;
    push(to);
    return number;
}

std::uint64_t Channels::receive(void* data, std::size_t bytes, int from) {
    Peer& peer = peers_.at(from);
    peer.receives.push_back({static_cast<char*>(data), bytes, bytes});
    return peer.received + peer.receives.size() - 1;
}

bool Channels::is_sent(std::uint64_t number, int to) {
    progress();
    return peers_.at(to).sent > number;
}

bool Channels::is_received(std::uint64_t number, int from) {
    progress();
    return peers_.at(from).received > number;
}

void Channels::wait_sent(std::uint64_t number, int to, double timeout_s) {
    wait_until([&] { return is_sent(number, to); }, counter(rank_), to, counter(to), timeout_s);
}

void Channels::wait_received(std::uint64_t number, int from, double timeout_s) {
    const auto is_done = [&] {
        if (is_received(number, from)) return true;
        check_size(from);
        return false;
    };
    wait_until(is_done, counter(rank_), from, counter(from), timeout_s);
}

void Channels::progress() {
    for (int rank = 0; rank < size_; ++rank) {
        if (!peers_[rank].sends.empty()) push(rank);
        if (!peers_[rank].receives.empty()) pull(rank);
    }
}

void Channels::push(int to) {
    Peer& peer = peers_[to];
    Ring& ring = this->ring(rank_, to);
    while (!peer.sends.empty()) {
        Outgoing& next = peer.sends.front();
        const bool wanted_room = ring.wants_room.load();
        std::size_t room = ring.room(ring_bytes_);
        const std::size_t least = next.is_announced ? 1 : sizeof(Size);
        if (room < least) {
            if (wanted_room) return;
            ring.wants_room.store(1);  // and look again: the reader either sees it or has made room before
            continue;
        }
        if (wanted_room) ring.wants_room.store(0);
        if (!next.is_announced) {
            const Size size = next.missing;
            ring.put(&size, sizeof(Size), ring_bytes_);
            next.is_announced = true;
            room -= sizeof(Size);
        }
        const std::size_t piece = std::min({next.missing, room, PIECE_BYTES});
        ring.put(next.data, piece, ring_bytes_);
        next.data += piece;
        next.missing -= piece;
        if (next.missing == 0) {
            peer.sends.pop_front();
            ++peer.sent;
        }
        counter(to).raise();
    }
}

void Channels::pull(int from) {
    Peer& peer = peers_[from];
    Ring& ring = this->ring(from, rank_);
    while (!peer.receives.empty()) {
        if (!peer.announced) {
            if (ring.filled() < sizeof(Size)) return;
            ring.take(&peer.announced.emplace(), sizeof(Size), ring_bytes_);
        }
        Incoming& next = peer.receives.front();
        if (*peer.announced != next.expected) return;  // `check_size` says so
        const std::size_t piece = std::min<std::size_t>({next.missing, ring.filled(), PIECE_BYTES});
        if (piece == 0 && next.missing > 0) return;
        ring.take(next.data, piece, ring_bytes_);
        next.data += piece;
        next.missing -= piece;
        if (next.missing == 0) {
            peer.receives.pop_front();
            peer.announced.reset();
            ++peer.received;
        }
        if (ring.wants_room.load()) counter(from).raise();
    }
}

void Channels::check_size(int from) const {
    const Peer& peer = peers_[from];
    if (!peer.announced || peer.receives.empty() || *peer.announced == peer.receives.front().expected) return;
    throw std::runtime_error("rank " + std::to_string(from) + " of the group sent " + std::to_string(*peer.announced) +
                             " bytes where rank " + std::to_string(rank_) + " receives " +
                             std::to_string(peer.receives.front().expected));
}

}  // namespace host
