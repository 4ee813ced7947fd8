// The graph of several steps, one node for every node of every step.
#pragma once

#include <vector>

#include "problem.h"

namespace realhf::search {

// Instance (step, node) has the number step x num_nodes + node. The nodes of step t without a parent in their own step
// wait for every last node (one without a child in its own step) of step t - max_steps_in_flight, too.
struct Unrolled {
    Unrolled(const Problem& problem, int steps);

    struct Children {
        const int *first, *last;
        const int* begin() const { return first; }
        const int* end() const { return last; }
    };
    Children children_of(int instance) const {
        return {children.data() + first_child[instance], children.data() + first_child[instance + 1]};
    }

    int num_nodes;
    int num_instances;
    std::vector<int> first_child;  // [instances + 1] into children
    std::vector<int> children;
    std::vector<int> num_parents;  // [instances]
    std::vector<int> order;        // of instances, parents first; without those in a cycle, and behind one
};

}  // namespace realhf::search
