#include "channels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace host {

namespace {

// The receiver begins to copy while the sender goes on.
constexpr std::size_t PIECE_BYTES = 128 * 1024;
using Size = std::uint64_t;  // precedes every message

// Bytes from which a message would fill the caches of its receiver, which does not read all of it at once.
constexpr std::size_t STREAMED_BYTES = 4 << 20;

Cursor over(Size& size) { return Cursor({{reinterpret_cast<char*>(&size), 1, sizeof(Size), 0}}); }

#if defined(__x86_64__)
// As memcpy, past the caches: lines that are written whole are not read before, which takes more than half of the time
// where rows are short. To be followed by `end_streaming` before others may read.
void stream(char* to, const char* from, std::size_t bytes) {
    const std::size_t head = std::min(bytes, (CACHE_LINE - reinterpret_cast<std::uintptr_t>(to) % CACHE_LINE) % CACHE_LINE);
    std::memcpy(to, from, head);
    const std::size_t end = head + (bytes - head) / CACHE_LINE * CACHE_LINE;
    for (std::size_t at = head; at < end; at += sizeof(__m128i))
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
    std::memcpy(to + end, from + end, bytes - end);
}

void end_streaming() { _mm_sfence(); }
#else
void stream(char* to, const char* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

void end_streaming() {}
#endif

void copy(char* to, const char* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace

Cursor::Cursor(std::vector<Rows> parts) : parts_(std::move(parts)) {
    const auto is_empty = [](const Rows& part) { return part.rows == 0 || part.row_bytes == 0; };
    parts_.erase(std::remove_if(parts_.begin(), parts_.end(), is_empty), parts_.end());
    for (const Rows& part : parts_) missing_ += part.rows * part.row_bytes;
    is_streamed_ = missing_ >= STREAMED_BYTES;
}

template <typename Copy>
void Cursor::advance(std::size_t bytes, Copy copy) {
    missing_ -= bytes;
    while (bytes > 0) {
        const Rows& part = parts_[part_];
        const std::size_t length = std::min(bytes, part.row_bytes - at_);
        copy(part.data + row_ * part.stride_bytes + at_, length);
        bytes -= length;
        at_ += length;
        if (at_ < part.row_bytes) continue;
        at_ = 0;
        if (++row_ < part.rows) continue;
        row_ = 0;
        ++part_;
    }
}

void Cursor::read(char* to, std::size_t bytes) {
    advance(bytes, [&to](const char* data, std::size_t length) {
        std::memcpy(to, data, length);
        to += length;
    });
}

void Cursor::write(const char* from, std::size_t bytes) {
    write_some(from, bytes);
    end_streaming();
}

void Cursor::write(Cursor& from, std::size_t bytes) {
    from.advance(bytes, [this](const char* data, std::size_t length) { write_some(data, length); });
    end_streaming();
}

void Cursor::write_some(const char* from, std::size_t bytes) {
    advance(bytes, [&from, this](char* data, std::size_t length) {
        (is_streamed_ ? stream : copy)(data, from, length);
        from += length;
    });
}

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

    void put(Cursor& from, std::size_t bytes, std::size_t capacity) {
        const std::uint32_t at = written.load(std::memory_order_relaxed);
        const std::size_t first = at_most_to_end(at, bytes, capacity);
        from.read(this->bytes() + place(at, capacity), first);
        from.read(this->bytes(), bytes - first);
        written.store(at + static_cast<std::uint32_t>(bytes));
    }

    void take(Cursor& to, std::size_t bytes, std::size_t capacity) {
        const std::uint32_t at = read.load(std::memory_order_relaxed);
        const std::size_t first = at_most_to_end(at, bytes, capacity);
        to.write(this->bytes() + place(at, capacity), first);
        to.write(this->bytes(), bytes - first);
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
    : memory_(descriptor, rank, size, required_bytes(size, ring_bytes)), ring_bytes_(ring_bytes), rank_(rank),
      size_(size), peers_(size) {}

Channels::Ring& Channels::ring(int from, int to) const {
    const std::size_t index = static_cast<std::size_t>(from) * size_ + to;
    return *reinterpret_cast<Ring*>(memory_.behind_counters() + index * (sizeof(Ring) + ring_bytes_));
}

std::uint64_t Channels::send(std::vector<Rows> parts, int to) {
    Peer& peer = peers_.at(to);
    peer.sends.push_back({Cursor(std::move(parts)), false});
    const std::uint64_t number = peer.sent + peer.sends.size() - 1;
    push(to);
    return number;
}

std::uint64_t Channels::receive(std::vector<Rows> parts, int from) {
    Peer& peer = peers_.at(from);
    Cursor target(std::move(parts));
    const std::size_t expected = target.missing();
    peer.receives.push_back({std::move(target), expected});
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
    const auto is_done = [&] {
        do {
            if (is_sent(number, to)) return true;
        } while (has_to_copy());
        return false;
    };
    wait_until(is_done, memory_.counter(rank_), to, memory_.counter(to), timeout_s);
}

void Channels::wait_received(std::uint64_t number, int from, double timeout_s) {
    const auto is_done = [&] {
        do {
            if (is_received(number, from)) return true;
            check_size(from);
        } while (has_to_copy());
        return false;
    };
    wait_until(is_done, memory_.counter(rank_), from, memory_.counter(from), timeout_s);
}

void Channels::progress() {
    for (int rank = 0; rank < size_; ++rank) {
        if (!peers_[rank].sends.empty()) push(rank);
        if (!peers_[rank].receives.empty()) pull(rank);
    }
    if (has_to_copy()) copy_piece();
}

bool Channels::has_to_copy() const {
    const Peer& own = peers_[rank_];
    return !own.sends.empty() && !own.receives.empty() && !own.sends.front().is_announced && !own.announced &&
           own.sends.front().rest.missing() == own.receives.front().rest.missing();
}

void Channels::copy_piece() {
    Peer& own = peers_[rank_];
    Cursor& from = own.sends.front().rest;
    own.receives.front().rest.write(from, std::min(from.missing(), PIECE_BYTES));
    if (from.missing() > 0) return;
    own.sends.pop_front();
    own.receives.pop_front();
    ++own.sent;
    ++own.received;
}

void Channels::push(int to) {
    Peer& peer = peers_[to];
    Ring& ring = this->ring(rank_, to);
    while (!peer.sends.empty() && !(to == rank_ && has_to_copy())) {
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
            Size size = next.rest.missing();
            Cursor announcement = over(size);
            ring.put(announcement, sizeof(Size), ring_bytes_);
            next.is_announced = true;
            room -= sizeof(Size);
        }
        ring.put(next.rest, std::min({next.rest.missing(), room, PIECE_BYTES}), ring_bytes_);
        if (next.rest.missing() == 0) {
            peer.sends.pop_front();
            ++peer.sent;
        }
        memory_.counter(to).raise();
    }
}

void Channels::pull(int from) {
    Peer& peer = peers_[from];
    Ring& ring = this->ring(from, rank_);
    while (!peer.receives.empty()) {
        if (!peer.announced) {
            if (ring.filled() < sizeof(Size)) return;
            Cursor announcement = over(peer.announced.emplace());
            ring.take(announcement, sizeof(Size), ring_bytes_);
        }
        Incoming& next = peer.receives.front();
        if (*peer.announced != next.expected) return;  // `check_size` says so
        const std::size_t piece = std::min<std::size_t>({next.rest.missing(), ring.filled(), PIECE_BYTES});
        if (piece == 0 && next.rest.missing() > 0) return;
        ring.take(next.rest, piece, ring_bytes_);
        if (next.rest.missing() == 0) {
            peer.receives.pop_front();
            peer.announced.reset();
            ++peer.received;
        }
        if (ring.wants_room.load()) memory_.counter(from).raise();
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
