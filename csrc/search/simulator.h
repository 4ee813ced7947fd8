// Time and memory of a plan: Algorithm 1 of the ReaL paper over several unrolled steps.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "problem.h"
#include "unrolled.h"

namespace realhf::search {

struct Event {
    int node;
    int step;
    double start;
    double end;
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

    // Time until the last node has ended; infinity as soon as that is known to be above `limit`.
    double makespan(const Plan& plan, double limit = std::numeric_limits<double>::infinity());

    // The largest need of a device: the static bytes of all calls placed on it, plus the largest dynamic need of one;
    // communicators, each once; and what it takes to send copies.
    double peak_bytes(const Plan& plan);

    // Sum over devices of what each needs; breaks ties between plans of one peak.
    double total_bytes(const Plan& plan);

    // All nodes of all steps in the order in which they were taken.
    std::vector<Event> trace(const Plan& plan);

private:
    struct Mesh {
        int begin;
        int end;
    };
    struct Ready {
        double time;
        int instance;
    };

    void place(const Plan& plan);
    void place_call(int call, const Option& option);
    double run(double limit, std::vector<Event>* events);
    void find_least_after();
    double bytes_at(const Plan& plan, int device);
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
