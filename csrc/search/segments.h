// How the graph of all steps falls into parts that follow one another.
#pragma once

#include <vector>

#include "problem.h"

namespace realhf::search {

// A part of the unrolled graph all of whose nodes come after all nodes of the parts before: whatever the schedule, it
// begins when those have ended, so that the makespan is the sum of the parts' makespans. In PPO, say, the inferences
// end one part and the trainings begin the next one. A graph without such barriers is one part. There is none next to a
// transfer: it counts together with the calls before and behind it.
struct Segment {
    int repeated = 1;                          // how many parts of the graph look like this
    std::vector<int> nodes;                    // [size] in topological order
    std::vector<std::vector<int>> parents;     // [size] direct ones within the part, as indices into `nodes`
    std::vector<std::vector<int>> children;    // [size]
    std::vector<std::vector<int>> before;      // [size] all that come before
    std::vector<std::vector<int>> after;       // [size] all that come after
    std::vector<std::pair<int, int>> unordered;  // pairs of which none comes before the other

    int size() const { return static_cast<int>(nodes.size()); }
};

// Without the transfers that never take longer than `negligible`, over which edges lead as if they were not there.
std::vector<Segment> segments_of(const Problem& problem, double negligible = -1);

}  // namespace realhf::search
