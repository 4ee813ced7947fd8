// Collectives of processes of one host over shared memory.
//
// Every rank copies its contribution into its own slot and raises its counter; ranks that need it wait for that
// counter. Sums are made in the order of the ranks, so every rank gets the same bits, whatever the timing. Slots come
// in pairs used in turns: a rank fills a slot again two rounds later, after it has seen every rank arrive in the round
// between, hence done with reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "waiting.h"

namespace host {

enum class DType { float32, float64, bfloat16, int64 };
enum class Operation { sum, max };

class HostGroup {
public:
    // `descriptor`: an open file of `required_bytes(size, slot_bytes)` zero bytes that all ranks map. It may be closed
    // afterwards.
    HostGroup(int descriptor, int rank, int size, std::size_t slot_bytes, double timeout_s);

    static std::size_t required_bytes(int size, std::size_t slot_bytes);

    // Collective. In place: `count` elements at `data`.
    void all_reduce(void* data, std::size_t count, DType dtype, Operation operation);
    // Collective. `input` has `size` parts of `count` elements; the sum (maximum) of this rank's part goes to `output`.
    void reduce_scatter(const void* input, void* output, std::size_t count, DType dtype, Operation operation);
    // Collective. The `bytes` of every rank, in the order of the ranks.
    void all_gather(const void* input, void* output, std::size_t bytes);
    // Collective. The `bytes` of rank `root` for everyone.
    void broadcast(void* data, std::size_t bytes, int root);
    // Collective. Returns once every rank has called it.
    void barrier();

private:
    char* slot(int rank, int stage) const;
    std::vector<const void*> slots(int stage, std::size_t offset) const;  // all ranks', from `offset` on
    void arrive();
    void wait_for(int rank);
    void wait_for_all();

    SharedMemory memory_;
    int rank_;
    int size_;
    std::size_t slot_bytes_;
    double timeout_s_;
    std::uint32_t round_ = 0;
};

}  // namespace host
