// Search and proof together, on several threads.
#include "solve.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "exact.h"
#include "threads.h"

namespace realhf::search {
namespace {

constexpr std::int64_t kEvaluationsPerChain = 50'000;  // fewer are better spent in one chain
constexpr std::int64_t kMostChains = 8;
// A bound takes as long as a few evaluations: a large budget is mostly for the search.
constexpr std::int64_t kBoundsPerEvaluation = 4;
constexpr std::int64_t kBoundsInFull = 400'000;
constexpr std::int64_t kEvaluationsPerBound = 8;
constexpr double kFirstSearch = 0.2, kShortestTurn = 0.1;  // seconds

std::uint64_t chain_seed(std::uint64_t seed, std::uint64_t chain) { return seed + chain * 0x9E3779B97F4A7C15ULL; }

using Trace = std::vector<std::pair<double, double>>;

// A fixed number of chains, whatever the number of threads that run them. Returns the best costs over time.
Trace search_by_count(const Problem& problem, const SolveOptions& options, const Preparation& prepared,
                      Incumbent& incumbent, Counts& counts) {
    const std::int64_t chains = std::clamp<std::int64_t>(options.evaluations / kEvaluationsPerChain, 1, kMostChains);
    std::vector<Searched> found(chains);
    std::vector<Trace> traces(chains);
    std::atomic<std::int64_t> next{0};
    on_threads(options.threads, [&](int) {
        for (std::int64_t chain; (chain = next++) < chains;) {
            HeuristicLimits limits;
            limits.evaluations = options.evaluations / chains + (chain < options.evaluations % chains);
            const double start_s = incumbent.seconds();
            Incumbent own;  // what the others find must not matter
            found[chain] = heuristic_search(problem, prepared, chain_seed(options.seed, chain), limits, own);
            for (const auto& [at_s, cost] : own.trace()) traces[chain].emplace_back(start_s + at_s, cost);
        }
    });
    for (const Searched& searched : found) {
        incumbent.offer(searched.plan, searched.fits, searched.cost);
        counts.add(searched.counts);
    }
    Trace merged;
    for (const Trace& trace : traces) merged.insert(merged.end(), trace.begin(), trace.end());
    return merged;
}

// At first all threads search, for a moment: what most problems need. Then one proves, and another one goes on searching;
// further ones prove, too. A thread that is alone takes turns.
Certificate search_by_time(const Problem& problem, const SolveOptions& options, const Preparation& prepared,
                           Incumbent& incumbent, Counts& counts) {
    std::mutex mutex;
    const auto search = [&](double until_s, std::uint64_t number) {
        HeuristicLimits limits;
        limits.until_s = until_s;
        const Searched found = heuristic_search(problem, prepared, chain_seed(options.seed, number), limits, incumbent);
        const std::lock_guard<std::mutex> lock(mutex);
        counts.add(found.counts);
    };
    const double first_s = options.proves ? std::min(options.seconds / 3, kFirstSearch) : options.seconds;
    on_threads(options.threads, [&](int t) { search(first_s, t); });
    std::uint64_t chain = options.threads;
    ExactLimits limits{prepared.progress.stop};
    if (!options.proves) {
        limits.bounds = 0;
        return prove(problem, limits, incumbent);
    }
    limits.until_s = options.seconds;
    limits.threads = std::max(1, options.threads - 1);
    if (options.threads == 1) {
        const double begun_s = incumbent.seconds();
        double searched_s = 0;
        limits.between = [&] {  // as long as the proof has taken
            const double now_s = incumbent.seconds(), turn_s = now_s - begun_s - 2 * searched_s;
            if (turn_s < kShortestTurn) return;
            search(std::min(now_s + turn_s, options.seconds), chain++);
            searched_s += incumbent.seconds() - now_s;
        };
        return prove(problem, limits, incumbent);
    }
    Certificate certificate{0, false, {}};
    on_threads(2, [&](int t) {
        if (t > 0) return search(options.seconds, chain);
        certificate = prove(problem, limits, incumbent);
        if (certificate.proven) prepared.progress.stop = true;
    });
    return certificate;
}

}  // namespace

Solution solve(const Problem& problem, const SolveOptions& options, Progress& progress) {
    Incumbent incumbent;
    const Preparation prepared(problem, options, progress);
    Solution solution;
    Certificate certificate{0, false, {}};
    Trace trace;
    if (options.evaluations > 0) {
        trace = search_by_count(problem, options, prepared, incumbent, solution.search_counts);
        ExactLimits limits{progress.stop};
        limits.bounds = std::min(kBoundsPerEvaluation * std::min(options.evaluations, kBoundsInFull),
                                 kBoundsInFull + options.evaluations / kEvaluationsPerBound);
        if (!options.proves) limits.bounds = 0;  // the bound that holds for all plans, and no more
        certificate = prove(problem, limits, incumbent);
    } else {
        certificate = search_by_time(problem, options, prepared, incumbent, solution.search_counts);
    }
    solution.plan = incumbent.plan();
    Simulator simulator(problem);
    solution.evaluation = evaluate(simulator, solution.plan);
    solution.lower_bound = certificate.lower_bound / problem.steps;
    solution.proven = certificate.proven;
    solution.counts = solution.search_counts;
    solution.counts.add(certificate.counts);
    const Trace last = incumbent.trace();
    trace.insert(trace.end(), last.begin(), last.end());
    std::sort(trace.begin(), trace.end());
    for (const auto& point : trace) {
        if (solution.trace.empty() || point.second < solution.trace.back().second) solution.trace.push_back(point);
    }
    return solution;
}

}  // namespace realhf::search
