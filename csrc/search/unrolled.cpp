// The graph of several steps.
#include "unrolled.h"

#include <stdexcept>

namespace realhf::search {

namespace {

int instances(const Problem& problem, int steps) {
    if (steps < 1 || steps > kMaxSimulated / problem.num_nodes()) throw std::invalid_argument("too many or too few steps");
    return steps * problem.num_nodes();
}

}  // namespace

Unrolled::Unrolled(const Problem& problem, int steps)
    : num_nodes(problem.num_nodes()), num_instances(instances(problem, steps)), num_parents(num_instances, 0) {
    std::vector<std::vector<int>> lists(num_instances);
    const auto add_edge = [&](int parent, int child) {
        lists[parent].push_back(child);
        ++num_parents[child];
    };
    std::vector<bool> is_first(num_nodes, true), is_last(num_nodes, true);
    for (int node = 0; node < num_nodes; ++node) {
        for (const Parent& parent : problem.parents(node)) {
            if (parent.steps_back == 0) is_first[node] = false, is_last[parent.node] = false;
            for (int step = parent.steps_back; step < steps; ++step) {
                add_edge((step - parent.steps_back) * num_nodes + parent.node, step * num_nodes + node);
            }
        }
    }
    for (int step = problem.max_steps_in_flight; step < steps; ++step) {
        for (int last = 0; last < num_nodes; ++last) {
            for (int first = 0; is_last[last] && first < num_nodes; ++first) {
                if (is_first[first]) {
                    add_edge((step - problem.max_steps_in_flight) * num_nodes + last, step * num_nodes + first);
                }
            }
        }
    }
    first_child.push_back(0);
    for (const std::vector<int>& list : lists) {
        children.insert(children.end(), list.begin(), list.end());
        first_child.push_back(static_cast<int>(children.size()));
    }
    std::vector<int> waits = num_parents;
    for (int instance = 0; instance < num_instances; ++instance) {
        if (waits[instance] == 0) order.push_back(instance);
    }
    for (std::size_t i = 0; i < order.size(); ++i) {
        for (int child : children_of(order[i])) {
            if (--waits[child] == 0) order.push_back(child);
        }
    }
}

}  // namespace realhf::search
