// One multiple-choice knapsack, solved exactly: a choice of every class with the largest gain within a capacity.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

namespace realhf::search::knapsack {

using Clock = std::chrono::steady_clock;

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Choice {
    std::int64_t bytes, gain;
    int origin;  // its index for the maker of the class
};

// The choices that no other one of the class dominates, by bytes and gain; `hull`: those on their upper convex hull.
struct Class {
    std::vector<Choice> choices;
    std::vector<int> hull;
};

// Of choices in any order; the one of the least `origin` stays of those that are equal.
Class class_of(std::vector<Choice> choices);

// A step from one choice on the hull of a class to the next: what the linear relaxation is made of.
struct Increment {
    int op;  // whose class it is
    std::int64_t bytes, gain;
    double slope;
};

// Of all classes, by slope.
std::vector<Increment> increments_of(const std::vector<const Class*>& classes);

// Around the greedy solution of the linear relaxation: at the relaxation's price of a byte, a solution's gain is the
// bound less price * free bytes and less what its choices lose against the greedy ones, so that only changes that lose
// less than the gap matter, those of few classes (the core: Pisinger, 1995). Two searches take them up; which
// one ends first depends on the instance.
class Knapsack {
  public:
    // All gains differ by multiples of `step`. The greedy solution is there when this returns.
    Knapsack(const std::vector<const Class*>& classes, std::int64_t capacity, Clock::time_point deadline,
             std::int64_t step = 1);

    // Looks for a gain above `gain`; returns whether one was found.
    //
    // One list of Pareto-optimal (bytes, gain), which classes are added to in the order of how near they are to
    // changing. Those not added yet stay at the greedy choice, which is the best one for every price of a byte between
    // `low` and `high`: this bounds what a sum can become, with the lower price below the capacity and the higher one
    // above. Of more than `width` sums, those of the best bounds are kept. Ends first if few classes matter, or many
    // are alike.
    bool sweep(std::int64_t gain, std::size_t width);

    // The same, but half of the classes go to one list and half to another; the best pair is found in one pass over
    // both (Horowitz and Sahni, 1974). Of the classes, every `distance`-th, and as many as give lists of `width`. Ends
    // first if many classes matter, the more of them the sooner if some solution meets the bound.
    bool meet(std::int64_t gain, std::size_t width, std::size_t distance = 1);

    std::int64_t best_gain() const { return best_gain_; }
    const std::vector<int>& best() const { return best_; }
    // No solution that was not looked at gains more than this; minus infinity if all of them were.
    double missed() const { return missed_; }
    std::int64_t states() const { return states_; }

  private:
    struct Sum {
        std::int64_t bytes, gain;  // over the greedy solution's
        int node;                  // in the tree of changes, -1: none
    };

    struct Change {
        int parent, op, choice;
    };

    struct Entry {
        int op;
        double low, high;        // prices between which the greedy choice is the best
        double loss;             // the least of any change
        double loss_from_here;   // and the least of all classes from this one on
    };

    void relax();
    Entry entry_of(int op, int taken) const;
    void begin(std::int64_t gain);
    bool may_improve(std::int64_t bytes, std::int64_t gain) const;
    template <typename Keep>
    void add(int op, std::vector<Sum>& sums, const Keep& may_be_kept);
    double bound(const Sum& sum, std::size_t k) const;
    void shrink(std::vector<Sum>& sums, std::size_t k, std::size_t width);
    void take(std::int64_t gain, int first, int second);

    const std::vector<const Class*>& classes_;
    std::int64_t capacity_;
    Clock::time_point deadline_;
    double slack_;  // a bound must exceed the best gain by this much for a better solution to be possible
    std::vector<int> start_, best_;
    std::vector<Entry> order_, in_turns_;  // by distance of prices; by loss, one to grow and one to shrink in turns
    std::vector<double> low_, high_;  // all classes from one on
    std::vector<Change> changes_;
    std::vector<Sum> shifted_, merged_;
    std::int64_t bytes_ = 0, gain_ = 0, best_gain_ = 0, states_ = 0;
    double price_ = 0, bound_ = 0, missed_ = -infinity;
    bool found_ = false;
};

}  // namespace realhf::search::knapsack
