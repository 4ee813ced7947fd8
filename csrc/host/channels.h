// Messages between processes of one host over shared memory.
//
// Every ordered pair of ranks has a ring of bytes. No thread serves it in the background: a send copies as much as fits
// and queues the rest, and a rank that waits for anything moves all that it can on its side. So ranks that send to each
// other at the same time, or more than a ring holds, do not deadlock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "waiting.h"

namespace host {

// A part of a message in the memory of one rank: `rows` of `row_bytes` each, `stride_bytes` from one to the next.
struct Rows {
    char* data;
    std::size_t rows, row_bytes, stride_bytes;
};

// Goes once through the bytes of several parts, one behind the other.
class Cursor {
public:
    explicit Cursor(std::vector<Rows> parts);

    std::size_t missing() const { return missing_; }  // bytes still to come
    // The next `bytes`, at most those missing, to or from another place.
    void read(char* to, std::size_t bytes);
    void write(const char* from, std::size_t bytes);
    // The next `bytes`, from another that has as many.
    void write(Cursor& from, std::size_t bytes);

private:
    void write_some(const char* from, std::size_t bytes);
    template <typename Copy>
    void advance(std::size_t bytes, Copy copy);

    std::vector<Rows> parts_;
    std::size_t missing_ = 0, part_ = 0, row_ = 0, at_ = 0;  // `at_`: bytes of the row that are done
    bool is_streamed_;  // written past the caches
};

// Not for several threads at a time.
class Channels {
public:
    // `descriptor`: an open file of `required_bytes(size, ring_bytes)` zero bytes that all ranks map; it may be closed
    // afterwards. Only what was used of a ring takes memory. `ring_bytes`: a power of two from 64 to 2^31.
    Channels(int descriptor, int rank, int size, std::size_t ring_bytes);

    static std::size_t required_bytes(int size, std::size_t ring_bytes);

    // Both return at once with the message's number among those to (from) that rank. Its memory must remain until it is
    // done; messages of a pair are matched in their order.
    // The two ends may divide a message into other parts.
    std::uint64_t send(std::vector<Rows> parts, int to);
    std::uint64_t receive(std::vector<Rows> parts, int from);

    // Whether all of it is in the ring; in the receiver's memory.
    bool is_sent(std::uint64_t number, int to);
    bool is_received(std::uint64_t number, int from);

    // Return once it is. Throw PeerError if the other rank has ended or after `timeout_s`; a receive throws
    // std::runtime_error if the message has another size.
    void wait_sent(std::uint64_t number, int to, double timeout_s);
    void wait_received(std::uint64_t number, int from, double timeout_s);

private:
    struct Ring;
    struct Outgoing {
        Cursor rest;        // the part that is not yet in the ring
        bool is_announced;  // its size is in the ring
    };
    struct Incoming {
        Cursor rest;           // where the next bytes go
        std::size_t expected;  // bytes in all
    };
    // This rank's ends of the rings to and from another.
    struct Peer {
        std::deque<Outgoing> sends;
        std::deque<Incoming> receives;
        std::uint64_t sent = 0, received = 0;  // messages done
        std::optional<std::uint64_t> announced;  // size of the message whose bytes come next
    };

    Ring& ring(int from, int to) const;
    void progress();
    // Whether this rank already awaits its next message to itself: that needs no ring, and is copied piece by piece
    // while no other message can move.
    bool has_to_copy() const;
    void copy_piece();
    void push(int to);
    void pull(int from);
    void check_size(int from) const;

    SharedMemory memory_;
    std::size_t ring_bytes_;
    int rank_;
    int size_;
    std::vector<Peer> peers_;
};

}  // namespace host
