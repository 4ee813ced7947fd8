// Changes of a plan that a search tries.
#pragma once

#include <utility>
#include <vector>

#include "problem.h"
#include "random.h"

namespace realhf::search {

// The changes of a move, to take it back.
struct Change {
    int call[2];
    int before[2];
    int count = 0;

    void undo(Plan& plan) const {
        for (int i = count - 1; i >= 0; --i) plan[call[i]] = before[i];
    }
};

// The options of every call by mesh and by layout. The problem must outlive it; several threads may share it.
class Moves {
public:
    explicit Moves(const Problem& problem);

    // The paper's move: any option for one call.
    Change single(Plan& plan, Random& random) const;

    // One call or two that belong together: the same mesh, the same layout, each other's mesh.
    Change coupled(Plan& plan, Random& random) const;

    // A plan to start from that single moves hardly reach: some calls on one mesh, some on another beside it, each
    // with its fastest option there; the rest wherever they are fastest.
    Plan divided(Random& random) const;

    // The options of a call that no other of the same mesh beats in time and in every kind of memory. Moves prefer
    // them, nothing is dropped: list scheduling has anomalies, and an equal layout can save a reallocation.
    const std::vector<int>& frontier(int call) const { return calls_[call].frontier; }

private:
    struct Index {
        std::vector<int> mesh_of, layout_of;         // [options]
        std::vector<std::vector<int>> by_mesh;       // [meshes] undominated options
        std::vector<std::vector<int>> by_layout;     // [layouts] all options
        std::vector<int> frontier;
        std::vector<int> fastest;  // [meshes] -1: none that fits
        int fastest_of_all = 0;
    };

    const Problem& problem_;
    std::vector<Index> calls_;
    std::vector<std::pair<int, int>> meshes_;  // first device, size
};

}  // namespace realhf::search
