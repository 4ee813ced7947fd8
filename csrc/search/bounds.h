// Lower bounds on the makespan of all plans of which something is known.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"
#include "segments.h"

namespace realhf::search {

// What holds for every option that a call may still take.
struct Outlook {
    double time;           // at least
    double area;           // time x devices, at least
    double static_bytes;   // at least
    double dynamic_bytes;  // at least
    double communicator_bytes;  // at least; calls may share them
    int size;              // devices, at least
    int last_begin;        // every mesh begins here or earlier ...
    int first_end;         // ... and ends (exclusively) here or later
};

// Every bound holds for every schedule in which a node starts after its parents, and in which a device does one thing
// at a time; so it holds for the simulator's.
//
// With h and t the least time that passes before and after a node within its part of the graph, over all parts:
//  - longest path;
//  - device-time: h(set) + sum of time x devices / number of devices + t(set);
//  - cliques: calls whose meshes intersect two by two have a device in common (intervals do), so that what runs on
//    them runs one after the other: the preemptive one-machine bound with heads h and tails t (Jackson, Carlier);
//  - two nodes in conflict run in one of two orders. One that would end too late fixes the other, which raises h and t.
class Bound {
public:
    Bound(const Problem& problem, const std::vector<Segment>& segments);

    // A bound on the makespan; infinity if none of the plans fits into memory, or as soon as the bound is above `limit`.
    // `transfer_times` [transfers] are the least possible ones.
    double operator()(const std::vector<Outlook>& calls, const std::vector<double>& transfer_times, double limit);

private:
    struct Part {
        const Segment* segment;
        std::vector<double> head, tail;  // [size]
        double bound;
    };

    bool find_cliques(const std::vector<Outlook>& calls);
    void grow_clique(std::uint64_t clique, std::uint64_t candidates, std::uint64_t excluded);
    void find_paths(Part& part) const;
    double by_area(const Part& part) const;
    double by_cliques(const Part& part);
    double one_machine(const Part& part, std::uint64_t clique);
    bool fix_orders(Part& part, double limit) const;  // false: the part cannot end by `limit`
    double duration(const Part& part, int i) const { return durations_[part.segment->nodes[i]]; }

    const Problem& problem_;
    const int num_calls_;
    std::vector<std::uint64_t> places_;  // [nodes] calls whose mesh it occupies
    std::vector<Part> parts_;

    std::vector<double> durations_, areas_;   // [nodes]
    std::vector<std::uint64_t> adjacent_;     // [calls] calls that certainly share a device with it, without itself
    std::vector<std::uint64_t> beside_;       // [nodes] calls whose nodes it excludes
    std::vector<std::uint64_t> cliques_;
    struct Job {
        double head, tail, left;
    };
    std::vector<Job> jobs_;
};

}  // namespace realhf::search
