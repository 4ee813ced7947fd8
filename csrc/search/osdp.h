// Per-operator sharded data parallelism as a family of multiple-choice knapsacks, solved exactly.
#pragma once

#include <cstdint>
#include <vector>

namespace realhf::search::osdp {

// What one slice of an operator costs in a mode: seconds of communication a step and bytes of model states.
struct Mode {
    double seconds;
    std::int64_t bytes;
    bool gathers;  // its parameters are gathered for use, so gather_bytes are needed for a moment
};

// An operator in equal slices, each with a mode of its own.
struct Cut {
    int slices;
    std::int64_t gather_bytes;  // while one slice is gathered (with the prefetched one, if any)
    std::vector<Mode> modes;
};

// The cuts to choose from. The first is the one of the fewest slices: what is in one mode and not gathered keeps it.
struct Operator {
    std::vector<Cut> cuts;
};

struct Problem {
    std::vector<Operator> operators;
    std::int64_t memory_bytes;      // of a device, less everything that depends neither on the modes nor on the batch
    std::int64_t bytes_per_sample;  // activations
    double seconds_per_sample;      // compute
};

struct Solution {
    bool feasible = false;
    int batch = 0;
    double step_s = 0;
    double lower_bound_s = 0;  // on the seconds per sample of every batch and every choice of modes
    bool proven = false;       // no other choice is faster (to one part in 10^12)
    std::vector<int> cuts;                  // [operator]
    std::vector<std::vector<int>> slices;   // [operator][mode]
    std::int64_t smallest_fixed_bytes = 0;  // model states and gather of the choice that needs the least
    std::int64_t states = 0;                // the knapsacks' dynamic programs
};

constexpr int most_slices = 64;  // of an operator

// The cuts and modes, and the batch in [min_batch, max_batch], of the least seconds per sample.
//
// Past `time_limit_s` the best choice so far comes back with the bound that was proven by then.
// Throws std::invalid_argument if an operator has no cut, no slice or no mode, or a number is negative.
Solution solve(const Problem& problem, int min_batch, int max_batch, double time_limit_s);

}  // namespace realhf::search::osdp
