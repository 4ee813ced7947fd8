// A planning problem: plain tables, everything the search needs and nothing about how the numbers came about.
//
// All times of a problem have one unit: seconds, or whole microseconds where it was read from a planning-problem/1
// file (sums of those are exact in a double).
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "times.h"

namespace realhf::search {

constexpr std::size_t kMaxCalls = 64;  // sets of calls are bit masks
constexpr int kMaxDevices = 1 << 20;
constexpr int kMaxInstances = 1 << 13;  // nodes x steps of a search; the proof relates each to each
constexpr int kMaxSimulated = 1 << 20;  // nodes x steps of one simulation
constexpr std::size_t kMaxParents = 1024;  // a node has
constexpr int kMaxLabel = 1 << 20;         // communicators' labels
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMaxNumber = 1e18;        // of times and bytes: sums of them are finite

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
    double time;           // the call alone
    double static_bytes;   // on each of its devices, for good; of a call away from its home, while it runs
    double dynamic_bytes;  // on each of its devices, while it runs
    double copy_bytes;     // on top of dynamic_bytes when the layout is not that of the call's home
    int communicators = 0;  // the number of its set in Problem::communicators

    bool is_on(int device) const { return first <= device && device < first + size; }
    bool same_mesh(const Option& other) const { return first == other.first && size == other.size; }
    bool same_layout(const Option& other) const { return same_mesh(other) && strategy == other.strategy; }
};

// What copies on the devices of their home need less while the call runs than while they are filled beside the home: by
// the strategies of home and copy, 0 where the home keeps its part meanwhile. Those that are filled in place need as much
// less, but for `in_place_bytes`, while they are filled.
struct Sparing {
    int num_strategies = 0;
    std::vector<double> bytes = {};  // home's strategy by copy's, or empty
    double in_place_bytes = kInfinity;

    double at(int home, int copy) const {
        return bytes.empty() ? 0 : bytes[static_cast<std::size_t>(home) * num_strategies + copy];
    }
};

struct Call {
    int home;  // the call in whose layout the model's parameters live
    std::vector<Parent> parents;
    std::vector<Option> options;
    Sparing spared = {};
};

// Moves data or parameters from the devices of call `source` to those of call `target`.
struct Transfer {
    int source;
    int target;
    std::vector<int> on;  // the calls whose devices it occupies: none for what runs beside the devices, one or two
    std::vector<Parent> parents;
    std::vector<int> rows;     // option of the source -> row of `times`
    std::vector<int> columns;  // option of the target -> column of `times`
    Times times;
    bool free_if_unmoved = false;  // takes no time between two options of one layout, whatever `times` says
};

// The copy of call `source` stays on its devices until the calls `takers` have theirs from it, also while one of the
// calls `beside` runs there.
struct KeptCopy {
    int source;
    std::vector<int> takers, beside;
    double size_bytes;

    bool is_taken_by(int call) const { return std::find(takers.begin(), takers.end(), call) != takers.end(); }
    bool is_beside(int call) const { return std::find(beside.begin(), beside.end(), call) != beside.end(); }
};

// The label of the communicator by which copies of parameters travel: where any call is not laid out as its home, every
// device has it.
constexpr int kMovesCommunicator = 1;

struct Problem {
    int num_devices;
    double device_memory_bytes;
    int steps;                // how many steps are unrolled; the objective is makespan / steps
    int max_steps_in_flight;  // step t starts when step t - max_steps_in_flight has ended
    std::vector<Call> calls;
    std::vector<Transfer> transfers;
    double communicator_bytes = 0;  // each, on every device that is in it
    double sending_bytes = 0;       // on devices that send a copy and do not get it, beside whatever runs there
    // Ascending labels of the communicators that each device of an option is in. Where options have a label in common,
    // it is the same communicator on every device that they share.
    std::vector<std::vector<int>> communicators = {{}};
    std::vector<KeptCopy> kept = {};  // of a given plan, whose calls have one option each

    std::size_t num_communicators(const Option& option) const { return communicators[option.communicators].size(); }

    // What an option needs at least on each of its devices, whatever else runs there.
    double alone_bytes(const Option& option) const {
        return option.static_bytes + option.dynamic_bytes + communicator_bytes * num_communicators(option);
    }

    // What a transfer takes between two options.
    double transfer_time(const Transfer& transfer, int source_option, int target_option) const {
        if (transfer.free_if_unmoved && calls[transfer.source].options[source_option].same_layout(
                                            calls[transfer.target].options[target_option])) {
            return 0;
        }
        return transfer.times.at(transfer.rows[source_option], transfer.columns[target_option]);
    }

    const Option& chosen(const std::vector<int>& plan, int call) const { return calls[call].options[plan[call]]; }

    // Whether a call works on its model's parameters where they live, and not on a copy, with which all is freed.
    bool is_at_home(const std::vector<int>& plan, int number) const {
        const int home = calls[number].home;
        return home == number || chosen(plan, number).same_layout(chosen(plan, home));
    }

    // The call from whose devices a call's parameters come: its home, or the one whose copy it takes.
    int source_of(int number) const {
        for (const KeptCopy& copy : kept) {
            if (copy.is_taken_by(number)) return copy.source;
        }
        return calls[number].home;
    }

    // What a call needs on a device of its own under a plan, beside what stays there: while its copy is filled, or while
    // it runs; with the copies that are kept there for others meanwhile.
    double needed_bytes(const std::vector<int>& plan, int number, int device) const {
        const Call& call = calls[number];
        const Option& option = chosen(plan, number);
        double filling = 0, running = option.dynamic_bytes;
        if (!is_at_home(plan, number)) {
            const Option& home = chosen(plan, call.home);
            const double spared = option.same_mesh(home) ? call.spared.at(home.strategy, option.strategy) : 0;
            filling = option.copy_bytes - std::max(spared - call.spared.in_place_bytes, 0.0);
            running = option.static_bytes + option.dynamic_bytes + std::max(option.copy_bytes - spared, 0.0);
        }
        for (const KeptCopy& copy : kept) {
            const Option& source = chosen(plan, copy.source);
            const bool is_taker = copy.is_taken_by(number);
            if (!source.is_on(device) || !copy.is_beside(number)) continue;
            if (is_taker && option.same_layout(source)) continue;  // what it takes over is its own copy
            filling += copy.size_bytes;
            if (!is_taker || copy.takers.size() > 1) running += copy.size_bytes;  // its only taker finds it freed
        }
        return std::max(filling, running);
    }

    int num_nodes() const { return static_cast<int>(calls.size() + transfers.size()); }
    const std::vector<Parent>& parents(int node) const {
        const int num_calls = static_cast<int>(calls.size());
        return node < num_calls ? calls[node].parents : transfers[node - num_calls].parents;
    }

    // [calls] the transfers from and to each.
    std::vector<std::vector<int>> transfers_of_calls() const {
        std::vector<std::vector<int>> result(calls.size());
        for (int i = 0; i < static_cast<int>(transfers.size()); ++i) {
            result[transfers[i].source].push_back(i);
            if (transfers[i].target != transfers[i].source) result[transfers[i].target].push_back(i);
        }
        return result;
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
