// Time and memory of a plan: Algorithm 1 of the ReaL paper over several unrolled steps.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "problem.h"
#include "unrolled.h"

namespace realhf::search {

struct Event {
    int node;
    int step;
    double start;
    double end;
    std::vector<int> waits;  // numbers of the events that it waits for: its parents, and what its devices did before
};

// Bytes on a device: its communicators, each once; with them all that stays there whatever runs; the peak.
struct DeviceNeed {
    double communicators, statics, peak;
};

// Evaluates many plans of one problem; allocates nothing after construction, and does only what differs from the plan
// before where plans are alike. The problem must outlive it.
//
// A node of a step is ready when its parents have ended, and starts when all of its devices are free. Nodes are taken
// in the order of readiness; ties: the earlier step, then the node's number. A transfer of length zero waits for its
// devices, too.
//
// Devices are not looked at one by one. A node occupies the whole mesh of one or two calls, so that the time at which
// its devices are free is the latest end of a node on a call whose mesh shares a device with one of those.
class Simulator {
public:
    explicit Simulator(const Problem& problem) : Simulator(problem, problem.steps) {}
    Simulator(const Problem& problem, int steps);

    const Problem& problem() const { return problem_; }

    // Time until the last node has ended; infinity as soon as that is known to be above `limit`.
    double makespan(const Plan& plan, double limit = kInfinity);

    // The largest need of a device: the static bytes of all calls placed on it, plus the largest dynamic need of one;
    // communicators, each once; and what it takes to send copies.
    double peak_bytes(const Plan& plan);

    // Sum over devices of what each needs; breaks ties between plans of one peak.
    double total_bytes(const Plan& plan);

    // What a device needs. A call that is not laid out as its home holds a copy of its parameters while it runs, and keeps
    // nothing, unless others take theirs from that copy.
    DeviceNeed need_at(const Plan& plan, int device);

    // All nodes of all steps in the order in which they were taken. `order` lists all (node, step) of some nodes, every
    // parent before its children: those that share a device run in that order. Throws std::invalid_argument for an order
    // that breaks an edge.
    std::vector<Event> trace(const Plan& plan, const std::vector<std::pair<int, int>>& order = {});

private:
    struct Mesh {
        int begin;
        int end;
    };
    struct Ready {
        double time;
        int instance;
    };

    // What a simulation notes that is looked at event by event.
    struct Trace {
        std::vector<std::vector<int>> behind;  // [instances] those that a given order has behind it on a device of its own
        std::vector<std::vector<int>> waits;   // [instances] events that it waits for, of those by now
        std::vector<int> last;                 // [calls + 1] the last event on the call's mesh, -1 before the first
        std::vector<Event> events;
    };

    void place(const Plan& plan);
    void place_call(int call, const Option& option);
    double run(double limit, Trace* trace);
    void note(Trace& trace, int instance, double start, double end) const;
    // Calls `visit` for each call whose mesh shares a device with the node's.
    template <typename Visit>
    void for_calls_beside(int node, const Visit& visit) const {
        for (std::uint64_t rest = overlaps_[first_place_[node]] | overlaps_[second_place_[node]]; rest; rest &= rest - 1) {
            visit(__builtin_ctzll(rest));
        }
    }
    void find_least_after();
    int communicators_at(const Plan& plan, int device);
    bool sends_at(const Plan& plan, int device) const;

    const Problem& problem_;
    const Unrolled graph_;
    const int num_calls_;
    const int num_nodes_;
    std::vector<std::vector<int>> transfers_of_;  // [calls] transfers whose time or place depends on the call
    std::vector<int> first_place_, second_place_;  // [nodes] the one or two calls whose mesh the node occupies, num_calls for none
    std::vector<int> node_of_;                     // [instances]
    std::vector<Ready> initially_ready_;
    std::vector<double> least_after_;              // [instances] at least this much time passes after its end

    std::vector<int> counted_at_;                  // [labels of communicators] the count that has seen it last
    int count_ = 0;

    // Of the plan that was placed last.
    std::vector<int> placed_;               // [calls] option, -1 before the first
    std::vector<Mesh> meshes_;              // [calls]
    std::vector<std::uint64_t> overlaps_;   // [calls + 1] calls that share a device with it, itself included; none for the last
    std::vector<double> durations_;         // [nodes]
    std::vector<int> stale_;                // [transfers] to be looked up again

    // Of the simulation that is running.
    std::vector<int> waits_;         // [instances] parents not yet ended
    std::vector<double> ready_at_;   // [instances]
    std::vector<double> last_end_;   // [calls + 1] when the last node on the call's mesh ends
    std::vector<Ready> ready_;       // unordered: there are few at a time
};

}  // namespace realhf::search
