// Lower bounds on the makespan of all plans of which something is known.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"
#include "segments.h"

namespace realhf::search {

// Prices of memory, in seconds of a step for all memory of a device, as parts of what a step takes.
constexpr int kPrices = 6;

// Facts of every option that a call may still take.
struct Outlook {
    double time;           // at least
    double area;           // time x devices, at least
    double static_bytes;   // at least
    double dynamic_bytes;  // at least
    double communicator_bytes;  // at least; calls may share them
    int size;              // devices, at least
    int last_begin;        // every mesh begins here or earlier ...
    int first_end;         // ... and ends (exclusively) here or later
    double fastest_static, fastest_dynamic;  // bytes, of an option of the least time
    double priced[kPrices];       // time + price x static_bytes, at least
    double priced_busy[kPrices];  // time + price x (static_bytes + dynamic_bytes), at least
};

// The least of a transfer's time, of the sum of its time and its target's, and of the sum of these and its source's: the
// options that are fastest to run are seldom those between which a transfer is fast.
struct Move {
    double time = 0;
    double with_target = 0;
    double with_both = 0;
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
//
// A transfer that nothing but its target waits for counts together with its target: what the two take at least. Along a
// path that is its own time with what is missing to the least sum ("joint"): where in truth the target takes longer and
// the transfer less, the target's h is too large by as much as the target's time is too small, and sums over both are
// not too large. In a clique the two are one job. Where the transfer waits for nothing but its source, the same holds of
// all three along their path ("between"). No call counts so with two transfers.
class Bound {
public:
    Bound(const Problem& problem, const std::vector<Segment>& segments, const std::vector<double>& prices);

    // A bound on the makespan; infinity if none of the plans fits into memory, or as soon as the bound is above `limit`.
    double operator()(const std::vector<Outlook>& calls, const std::vector<Move>& moves, double limit);

private:
    struct Part {
        const Segment* segment;
        std::vector<double> head, tail;  // [size]
        double bound;
        // [size] whether nothing but its target waits for the transfer; the index of its source if it waits for nothing
        // else, or -1.
        std::vector<bool> joins_target;
        std::vector<int> source;
    };

    Part part_of(const Segment& segment) const;
    void count_moves(const std::vector<Outlook>& calls, const std::vector<Move>& moves);
    bool pays_for_memory(const std::vector<Outlook>& calls, double limit);
    bool find_cliques(const std::vector<Outlook>& calls);
    void grow_clique(std::uint64_t clique, std::uint64_t candidates, std::uint64_t excluded);
    void find_paths(Part& part) const;
    double by_area(const Part& part) const;
    double by_cliques(const Part& part);
    double one_machine(const Part& part, std::uint64_t clique);
    bool fix_orders(Part& part, double limit) const;  // false: the part cannot end by `limit`
    double duration(const Part& part, int i) const { return durations_[part.segment->nodes[i]]; }
    double joint(const Part& part, int i) const {
        return part.joins_target[i] ? joints_[part.segment->nodes[i]] : duration(part, i);
    }
    double between(const Part& part, int i) const { return between_[part.segment->nodes[i]]; }

    const Problem& problem_;
    const std::vector<double> prices_;  // [kPrices] seconds a byte
    const int num_calls_;
    std::vector<std::uint64_t> places_;  // [nodes] calls whose mesh it occupies
    std::vector<Part> parts_;

    std::vector<double> durations_, areas_, joints_, between_;  // [nodes]
    int best_price_ = kPrices / 2;            // the highest bound's, the last time
    std::vector<double> gains_;               // [transfers]
    std::vector<std::uint64_t> adjacent_;     // [calls] calls that certainly share a device with it, without itself
    std::vector<std::uint64_t> beside_;       // [nodes] calls whose nodes it excludes
    std::vector<std::uint64_t> cliques_;
    struct Job {
        double head, tail, left;
    };
    std::vector<Job> jobs_;
    std::vector<int> available_;  // jobs
};

}  // namespace realhf::search
