// Branch and bound over plans: proves how far from the best a plan can be, and finds better ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>

#include "problem.h"
#include "search.h"

namespace realhf::search {

struct ExactLimits {
    const std::atomic<bool>& stop;
    std::int64_t bounds = std::numeric_limits<std::int64_t>::max();  // how many bounds may be computed, about
    double until_s = kInfinity;        // on the incumbent's clock
    int threads = 1;
    std::function<void()> between = nullptr;  // called between two attempts; may improve the incumbent
};

struct Certificate {
    double lower_bound;  // no feasible plan has a makespan below
    bool proven;         // the incumbent is optimal
    Counts counts;       // plans evaluated on the way
};

// Raises a lower bound towards the incumbent's cost: asks again and again whether there is a plan below a target in the
// gap, each time answered by a depth-first search. One that takes too long is given up for a lower target, so that the
// bound rises early, and taken up again with more time. A call's options are first taken together by the sizes of their
// meshes, then mesh by mesh (with the least time and memory of any of them), then one by one; after each choice what
// cannot be part of a plan below the target leaves the other calls' domains. No dominance is used: an option is dropped
// only by a bound, or because it fits on no device.
//
// Feasible plans better than the incumbent are offered to it. With one thread and no time limit the outcome depends
// on nothing but the problem, the incumbent and the number of bounds.
Certificate prove(const Problem& problem, const ExactLimits& limits, Incumbent& incumbent);

// The bound that `prove` works with, on a step of all plans with these options ([calls], -1: any); infinity if it is above
// `limit`. A finite limit makes it prove more.
double lower_bound(const Problem& problem, const Plan& chosen, double limit);

}  // namespace realhf::search
