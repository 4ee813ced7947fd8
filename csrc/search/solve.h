// Search and proof together, on several threads.
#pragma once

#include <utility>
#include <vector>

#include "problem.h"
#include "search.h"

namespace realhf::search {

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
Solution solve(const Problem& problem, const SolveOptions& options, Progress& progress);

}  // namespace realhf::search
