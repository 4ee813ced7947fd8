// The choices that a branch and bound has left.
#pragma once

#include <vector>

#include "bounds.h"
#include "problem.h"

namespace realhf::search {

// How much of a call is chosen by a choice: the size of its mesh, the mesh, or everything.
enum class Level { size, mesh, option };

// The choices that a call has left.
struct Domain {
    Level level;
    std::vector<int> numbers;  // of sizes or meshes among the call's, or of options

    bool is_settled() const { return level == Level::option && numbers.size() == 1; }
    Domain only(int number) const { return {level, {number}}; }
};

// The options of all calls, taken together by sizes and by meshes, and what follows from choices among them. Options
// that fit on no device, whatever else runs there, are left out (unless a call has no other).
class Groups {
public:
    // `prices` [kPrices] seconds a byte.
    Groups(const Problem& problem, const std::vector<double>& prices);

    Outlook outlook(int call, const Domain& domain) const;

    // A domain of all sizes.
    Domain all(int call) const;
    // What is in a domain of one choice: the meshes of a size, the options of a mesh (fastest first), or an option.
    Domain opened(int call, const Domain& domain) const;

    // The transfers from and to a call.
    const std::vector<int>& transfers_of(int call) const { return transfers_of_[call]; }

    // The least of a transfer between two domains.
    Move least(int transfer, const Domain& source, const Domain& target) const;

    // Whether a mesh need not be tried since exchanging two parts of the cluster, which changes nothing else, turns it
    // into one that is tried. `domains` are those of all calls.
    bool is_mirrored(int call, int mesh, const std::vector<Domain>& domains) const;

private:
    struct Members {
        std::vector<int> numbers;  // of meshes, or of options
        Outlook outlook;
    };
    struct Choice {
        Level level;
        int number;
    };
    struct Exchange {  // [begin, middle) with [middle, end)
        int begin, middle, end;

        bool keeps(int first, int last) const {  // [first, last) is where it was
            return last <= begin || first >= end || (first <= begin && last >= end);
        }
    };
    // Of a mesh, the fastest of the options that a transfer does not tell apart.
    using Representatives = std::vector<std::vector<int>>;

    Outlook outlook_of(int call, int option) const;
    Outlook outlook_of(int call, const Choice& choice) const;
    bool changes_nothing(const Exchange& exchange) const;
    std::vector<double> signature(int call, int option) const;
    Representatives representatives(const Transfer& transfer, int call, const std::vector<int>& rows) const;
    Move least_of(const Transfer& transfer, const std::vector<int>& sources, const std::vector<int>& targets) const;
    Move least_of(int transfer, const Choice& source, const Choice& target) const;
    Choice coarse(int call, const Domain& domain, std::size_t i) const;
    std::size_t unit(int call, const Choice& choice) const;

    const Problem& problem_;
    const std::vector<double> prices_;
    std::vector<std::vector<Members>> sizes_, meshes_;  // [calls]
    std::vector<std::vector<int>> mesh_of_;             // [calls][options] -1: left out
    std::vector<Exchange> exchanges_;
    struct Moves {
        Representatives sources, targets;
        std::vector<Move> between;  // [sizes and meshes of the source x of the target]
    };
    std::vector<Moves> moves_;                    // [transfers]
    std::vector<std::vector<int>> transfers_of_;  // [calls]
};

}  // namespace realhf::search
