// What a branch and bound still has to choose from.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "bounds.h"
#include "problem.h"

namespace realhf::search {

// Options of a call that have the same mesh.
struct Group {
    std::vector<int> options;  // fastest first
    Outlook outlook;
};

// Either a group (option is -1) or one option of it.
struct Choice {
    int group;
    int option;
};

struct Domain {
    std::vector<Choice> choices;
    bool is_placed = false;  // the mesh is chosen: the choices are options of one group
};

// The groups of all calls and what follows from choices among them.
class Groups {
public:
    explicit Groups(const Problem& problem);

    const Problem& problem() const { return problem_; }
    const std::vector<Group>& of(int call) const { return groups_[call]; }
    Outlook outlook(int call, const Choice& choice) const;
    Outlook outlook(int call, const Domain& domain) const;

    // A domain of all groups, or of the options of one.
    Domain all(int call) const;
    Domain opened(int call, int group) const;

    // The least time of a transfer between two choices.
    double least_transfer(int transfer, const Choice& source, const Choice& target) const;

    // Whether a group need not be tried since exchanging two parts of the cluster, which changes nothing else, turns it
    // into one that is tried. `placed` are the domains of all calls.
    bool is_mirrored(int call, int group, const std::vector<Domain>& domains) const;

private:
    struct Exchange {  // [begin, begin + size) with [begin + size, begin + 2 size)
        int begin;
        int size;
    };
    Outlook outlook_of(int call, int option) const;
    bool changes_nothing(const Exchange& exchange) const;
    std::vector<double> signature(int call, int option) const;
    std::vector<std::vector<int>> moved_of(const Transfer& transfer, int call, const std::vector<int>& rows) const;
    double least(const Transfer& transfer, const std::vector<int>& sources, const std::vector<int>& targets) const;

    const Problem& problem_;
    std::vector<std::vector<Group>> groups_;  // [calls]
    std::vector<Exchange> exchanges_;
    struct Moved {  // of each group, one of the options that a transfer does not tell apart
        std::vector<std::vector<int>> sources, targets;
    };
    std::vector<Moved> moved_;                         // [transfers]
    std::vector<std::vector<double>> between_groups_;  // [transfers][source groups x target groups]
};

}  // namespace realhf::search
