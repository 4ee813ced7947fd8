// Search and proof together, on several threads.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "problem.h"
#include "search.h"

namespace realhf::search {

constexpr int kMostThreads = 1024;
constexpr double kMostSeconds = 1e9;

// Exactly one of `evaluations` and `seconds` limits the work; the other is 0.
struct SolveOptions {
    std::uint64_t seed = 0;
    std::int64_t evaluations = 0;  // of the heuristic search; the proof may compute as many bounds, or fewer of many
    double seconds = 0;
    int threads = 1;
    bool single_moves = false;
    bool proves = true;
    Progress* progress = nullptr;
    std::vector<Plan> starts = {};  // plans that are there already: the solution is no worse than any of them
};

struct Solution {
    Plan plan;
    Evaluation evaluation;
    double lower_bound;  // on makespan / steps of feasible plans; infinity if there is none
    bool proven;         // the plan is optimal, or there is no feasible one
    Counts counts;
    Counts search_counts;  // of the heuristic search
    std::vector<std::pair<double, double>> trace;  // (seconds, best makespan / steps)
};

// With a number of evaluations the plan and the bound are the same whatever the number of threads.
// Throws std::invalid_argument for limits out of range.
Solution solve(const Problem& problem, const SolveOptions& options);

}  // namespace realhf::search
