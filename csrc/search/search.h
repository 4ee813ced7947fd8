// The heuristic plan search: Metropolis-Hastings with tempered replicas, and coordinate descent around it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "moves.h"
#include "problem.h"
#include "simulator.h"

namespace realhf::search {

// The cost of a plan over the memory limit is its time x this x (its peak / the limit).
constexpr double kInfeasibleFactor = 1000;

struct Evaluation {
    double step_time;   // makespan / steps
    double peak_bytes;  // of the worst device
    bool feasible;
    double cost;        // step_time, or the penalised value
};

Evaluation evaluate(Simulator& simulator, const Plan& plan);

// How many plans were looked at.
struct Counts {
    std::int64_t full = 0;      // simulated to the end
    std::int64_t rejected = 0;  // given up once it was certain that they would not be accepted

    std::int64_t total() const { return full + rejected; }
    void add(const Counts& other) { full += other.full, rejected += other.rejected; }
};

// A plan that fits is better than any that does not, whatever their costs.
inline bool is_better(bool fits, double cost, bool other_fits, double other_cost) {
    return fits != other_fits ? fits : cost < other_cost;
}

// The best plan that any of several threads has seen.
class Incumbent {
public:
    // Infinity as long as no plan is known that fits.
    double cost() const { return cost_.load(std::memory_order_relaxed); }
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    void offer(const Plan& plan, bool fits, double cost);
    Plan plan() const;
    std::vector<std::pair<double, double>> trace() const;  // (seconds since construction, cost())

private:
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    std::atomic<double> cost_{kInfinity};
    mutable std::mutex mutex_;
    Plan plan_;
    double plan_cost_ = kInfinity;  // of plan_, which may not fit
    std::vector<std::pair<double, double>> trace_;
};

// How far a search is, for another thread that watches it and may end it.
struct Progress {
    std::atomic<std::int64_t> evaluations{0};
    std::atomic<double> cost{kInfinity};  // of the best plan that fits
    std::atomic<bool> stop{false};

    void offer(double found) {
        double known = cost.load(std::memory_order_relaxed);
        while (found < known && !cost.compare_exchange_weak(known, found, std::memory_order_relaxed)) {}
    }
};

// Exactly one of `evaluations` and `seconds` limits the work; the other is 0.
struct SolveOptions {
    std::uint64_t seed = 0;
    std::int64_t evaluations = 0;  // of the heuristic search; the proof may compute as many bounds, or fewer of many
    double seconds = 0;
    int threads = 1;
    bool single_moves = false;  // one chain with the paper's moves, nothing else
    bool proves = true;
    std::vector<Plan> starts = {};  // plans that are there already: the solution is no worse than any of them
};

struct HeuristicLimits {
    std::int64_t evaluations = std::numeric_limits<std::int64_t>::max();
    double until_s = kInfinity;  // on the incumbent's clock
};

// What all searches of a problem begin with; they share it. The problem must outlive it.
struct Preparation {
    Preparation(const Problem& problem, const SolveOptions& options, Progress& progress);

    const bool single_moves;
    Progress& progress;
    Moves moves;
    std::vector<Plan> starts;  // those given, the best first, the greedy plan, and a small one if none of them fits
    double unit;               // seconds of the greedy plan: temperatures are relative to it
};

// Searches until a limit is reached and offers what it finds to the incumbent. Depends on nothing but the problem, its
// preparation, the seed and the number of evaluations if only that is limited. Returns how much it looked at, and the
// best plan it saw: whatever the limits, it looks at all starts (with `single_moves` at the last).
struct Searched {
    Plan plan;
    bool fits = false;
    double cost = kInfinity;
    Counts counts;
};
Searched heuristic_search(const Problem& problem, const Preparation& prepared, std::uint64_t seed,
                          const HeuristicLimits& limits, Incumbent& incumbent);

// For every call the fastest option that fits into memory by itself (the paper's start), else its smallest option.
Plan greedy_plan(const Problem& problem);

// A plan of small peak memory: coordinate descent on the peak from several starts.
Plan smallest_plan(const Problem& problem, std::uint64_t seed);

}  // namespace realhf::search
