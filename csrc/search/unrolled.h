// The graph of several steps, one node for every node of every step.
#pragma once

#include <vector>

#include "problem.h"

namespace realhf::search {

// Instance (step, node) has the number step x num_nodes + node. The nodes of step t without a parent in their own step
// wait for every last node (one without a child in its own step) of step t - max_steps_in_flight, too.
struct Unrolled {
    Unrolled(const Problem& problem, int steps);

    int num_nodes;
    int num_instances;
    std::vector<int> first_child;  // [instances + 1] into children
    std::vector<int> children;
    std::vector<int> num_parents;  // [instances]
};

}  // namespace realhf::search
