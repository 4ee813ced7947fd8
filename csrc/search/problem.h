// A planning problem: plain tables, everything the search needs and nothing about how the numbers came about.
//
// All times of a problem have one unit: seconds, or whole microseconds where it was read from a planning-problem/1
// file (sums of those are exact in a double).
#pragma once

#include <string>
#include <vector>

namespace realhf::search {

constexpr std::size_t kMaxCalls = 64;  // sets of calls are bit masks

// The node's instance of step t waits for `node` of step t - steps_back. Nodes are numbered calls first, then transfers.
struct Parent {
    int node;
    int steps_back;
};

// One way to run a call. Two options have the same layout when devices and strategy are equal.
struct Option {
    int first;             // first device
    int size;              // number of consecutive devices
    int strategy;          // opaque label
    double time;           // of the call alone
    double static_bytes;   // on each of its devices, for good
    double dynamic_bytes;  // on each of its devices, while it runs
    double copy_bytes;     // on top of dynamic_bytes when the layout is not that of the call's home

    bool same_mesh(const Option& other) const { return first == other.first && size == other.size; }
    bool same_layout(const Option& other) const { return same_mesh(other) && strategy == other.strategy; }
};

struct Call {
    int home;  // the call in whose layout the model's parameters live
    std::vector<Parent> parents;
    std::vector<Option> options;
};

// Moves data or parameters from the devices of call `source` to those of call `target`.
struct Transfer {
    int source;
    int target;
    std::vector<int> on;  // the one or two calls whose devices it occupies
    std::vector<Parent> parents;
    std::vector<int> rows;     // option of the source -> row of `times`
    std::vector<int> columns;  // option of the target -> column of `times`
    int num_columns;
    std::vector<double> times;     // row-major
    bool free_if_unmoved = false;  // takes no time between two options of one layout, whatever `times` says

    double at(int source_option, int target_option) const {
        return times[static_cast<std::size_t>(rows[source_option]) * num_columns + columns[target_option]];
    }
};

struct Problem {
    int num_devices;
    double device_memory_bytes;
    int steps;                // how many steps are unrolled; the objective is makespan / steps
    int max_steps_in_flight;  // step t starts when step t - max_steps_in_flight has ended
    std::vector<Call> calls;
    std::vector<Transfer> transfers;

    // What a transfer takes between two options.
    double transfer_time(const Transfer& transfer, int source_option, int target_option) const {
        if (transfer.free_if_unmoved && calls[transfer.source].options[source_option].same_layout(
                                            calls[transfer.target].options[target_option])) {
            return 0;
        }
        return transfer.at(source_option, target_option);
    }

    int num_nodes() const { return static_cast<int>(calls.size() + transfers.size()); }
    const std::vector<Parent>& parents(int node) const {
        const int num_calls = static_cast<int>(calls.size());
        return node < num_calls ? calls[node].parents : transfers[node - num_calls].parents;
    }

    // The calls whose devices a node occupies.
    std::vector<int> places(int node) const {
        const int num_calls = static_cast<int>(calls.size());
        return node < num_calls ? std::vector<int>{node} : transfers[node - num_calls].on;
    }

    // Throws std::invalid_argument for tables that do not fit together, or a cycle within a step.
    void check() const;
};

// A plan: the index of the chosen option for every call.
using Plan = std::vector<int>;

}  // namespace realhf::search
