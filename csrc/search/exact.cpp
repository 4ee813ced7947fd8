// Branch and bound over plans.
#include "exact.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "bounds.h"
#include "domains.h"
#include "segments.h"
#include "simulator.h"
#include "threads.h"

namespace realhf::search {
namespace {

constexpr std::int64_t kBoundsBetweenClocks = 64;
constexpr std::size_t kJobsPerThread = 64;

// A search below a target is given up after so many bounds, for one below a lower target; when the targets are as low as
// that, it may take longer.
constexpr std::int64_t kFirstAttempt = 10'000;
constexpr std::int64_t kAttemptGrowth = 8;
constexpr double kLeastPart = 1.0 / 64;  // as a part of the gap
constexpr double kNegligible = 1e-4;    // of a step: transfers that take less are not looked at
constexpr double kLastGap = 0.004;       // which is closed at once, if it can be
constexpr double kSlack = 1e-9;          // relative difference below which two makespans are the same

using State = std::vector<Domain>;  // [calls]

bool all_times_are_whole(const Problem& problem) {
    const auto is_whole = [](double time) { return time == std::floor(time) && time < 0x1.0p40; };
    bool whole = true;
    for (const Call& call : problem.calls) {
        for (const Option& option : call.options) whole = whole && is_whole(option.time);
    }
    for (const Transfer& transfer : problem.transfers) {
        for (double time : transfer.times) whole = whole && is_whole(time);
    }
    return whole;
}

// Prices of memory where a step takes about `step`.
std::vector<double> prices_of(const Problem& problem, double step) {
    std::vector<double> prices;
    for (int k = 0; k < kPrices; ++k) prices.push_back(std::ldexp(step / problem.device_memory_bytes, -k));
    return prices;
}

// State that the threads of one proof share. Prices, and what is negligible, are relative to `step`: about what a step takes.
struct Shared {
    Shared(const Problem& problem, const ExactLimits& limits, Incumbent& incumbent, double step)
        : problem(problem), limits(limits), incumbent(incumbent), prices(prices_of(problem, step)),
          segments(segments_of(problem, kNegligible * step)), groups(problem, prices),
          is_whole(all_times_are_whole(problem)) {}

    const Problem& problem;
    const ExactLimits& limits;
    Incumbent& incumbent;
    const std::vector<double> prices;
    const std::vector<Segment> segments;
    const Groups groups;
    const bool is_whole;
    std::atomic<double> target{kInfinity};  // looking for a makespan below
    std::atomic<std::int64_t> bounds{0};
    std::atomic<bool> out_of_budget{false};
    std::atomic<std::int64_t> attempt_until{0};  // bounds
    std::atomic<bool> attempt_is_over{false};
    std::atomic<std::size_t> next_job{0};

    // A search ends where the budget does, or what it was given of it.
    bool is_over() const { return attempt_is_over.load(std::memory_order_relaxed); }
    void count(std::int64_t pending) {
        const std::int64_t used = bounds.fetch_add(pending) + pending;
        if (used >= limits.bounds || limits.stop || incumbent.seconds() >= limits.until_s) {
            out_of_budget = true;
        }
        if (out_of_budget || used >= attempt_until) attempt_is_over = true;
    }

    double limit() const {
        const double below = std::min(target.load(std::memory_order_relaxed), incumbent.cost() * problem.steps);
        return is_whole ? below - 0.5 : below * (1 - kSlack);
    }
};

class Worker {
public:
    explicit Worker(Shared& shared)
        : shared_(shared),
          groups_(shared.groups),
          bound_(shared.problem, shared.segments, shared.prices),
          simulator_(shared.problem),
          num_calls_(static_cast<int>(shared.problem.calls.size())),
          outlooks_(num_calls_),
          moves_(shared.problem.transfers.size()) {}

    const Counts& counts() const { return counts_; }

    // The bound on all plans of a state.
    double bound_of(const State& state, double limit) {
        look_at(state);
        return bound_(outlooks_, moves_, limit);
    }

    // Takes from every domain what a bound excludes, until nothing changes; false if a domain becomes empty.
    bool filter(State& state) {
        look_at(state);
        if (bound() > shared_.limit()) return false;
        for (int call = 0, unchanged = 0; unchanged < num_calls_; call = (call + 1) % num_calls_) {
            ++unchanged;
            if (shared_.is_over()) return true;
            Domain& domain = state[call];
            if (domain.is_settled()) continue;
            Domain kept{domain.level, {}};
            for (int number : domain.numbers) {
                look_at(state, call, domain.only(number));
                if (bound() <= shared_.limit()) kept.numbers.push_back(number);
            }
            if (kept.numbers.empty()) return false;
            const bool opens = kept.numbers.size() == 1 && domain.level != Level::option;
            const bool changed = opens || kept.numbers.size() != domain.numbers.size();
            domain = opens ? groups_.opened(call, kept) : std::move(kept);
            if (changed) unchanged = 0;
            look_at(state, call, domain);
            if (changed && bound() > shared_.limit()) return false;
        }
        return true;
    }

    // Filters a state, and returns a call with what can be chosen for it. Where everything is chosen, the plan is
    // tried: nothing is left to choose.
    std::pair<int, std::vector<Domain>> branch(State& state) {
        if (!filter(state) || shared_.is_over()) return {};
        const int call = branching_call(state);
        if (call >= 0) return {call, branches(state, call)};
        try_plan(state);
        return {};
    }

    void search(State state) {
        if (shared_.is_over()) return;
        const auto [call, choices] = branch(state);
        for (const Domain& choice : choices) {
            if (shared_.is_over()) return;
            State next = state;
            next[call] = choice;
            search(std::move(next));
        }
    }

private:
    // Where to branch next: sizes before meshes before options, few choices before many. -1: everything is chosen.
    int branching_call(const State& state) const {
        int best = -1;
        auto best_key = std::make_tuple(Level::size, std::size_t{0}, 0.0);
        for (int call = 0; call < num_calls_; ++call) {
            if (state[call].is_settled()) continue;
            const auto key =
                std::make_tuple(state[call].level, state[call].numbers.size(), -groups_.outlook(call, state[call]).time);
            if (best < 0 || key < best_key) best = call, best_key = key;
        }
        return best;
    }

    // The choices of a call, the one with the lowest bound first, and of those that mirror one another only one.
    std::vector<Domain> branches(const State& state, int call) {
        std::vector<std::pair<double, Domain>> rated;
        look_at(state);
        if (bound() > shared_.limit()) return {};
        for (int number : state[call].numbers) {
            if (state[call].level == Level::mesh && groups_.is_mirrored(call, number, state)) continue;
            const Domain choice = state[call].only(number);
            look_at(state, call, choice);
            const double bound = this->bound();
            if (bound <= shared_.limit()) rated.emplace_back(bound, groups_.opened(call, choice));
        }
        std::stable_sort(rated.begin(), rated.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        std::vector<Domain> result;
        for (auto& [_, choice] : rated) result.push_back(std::move(choice));
        return result;
    }

    void try_plan(const State& state) {
        Plan plan;
        for (const Domain& domain : state) plan.push_back(domain.numbers.front());
        if (simulator_.peak_bytes(plan) > shared_.problem.device_memory_bytes) return;
        const double limit = shared_.incumbent.cost() * shared_.problem.steps;
        const double makespan = simulator_.makespan(plan, limit);
        ++(makespan < kInfinity ? counts_.full : counts_.rejected);
        if (makespan < limit) shared_.incumbent.offer(plan, true, makespan / shared_.problem.steps);
    }

    // What is known under a state: of all calls and transfers, or of a call with one of its choices and of what is
    // moved to and from it.
    void look_at(const State& state) {
        for (int call = 0; call < num_calls_; ++call) look_at(state, call, state[call]);
    }

    void look_at(const State& state, int call, const Domain& chosen) {
        outlooks_[call] = groups_.outlook(call, chosen);
        const auto domain_of = [&](int other) -> const Domain& { return other == call ? chosen : state[other]; };
        for (int i : groups_.transfers_of(call)) {
            const Transfer& transfer = shared_.problem.transfers[i];
            moves_[i] = groups_.least(i, domain_of(transfer.source), domain_of(transfer.target));
        }
    }

    double bound() {
        if (++pending_ >= kBoundsBetweenClocks) {
            shared_.count(pending_);
            pending_ = 0;
        }
        return bound_(outlooks_, moves_, shared_.limit());
    }

    Shared& shared_;
    const Groups& groups_;
    Bound bound_;
    Simulator simulator_;
    const int num_calls_;
    Counts counts_;
    std::int64_t pending_ = 0;
    std::vector<Outlook> outlooks_;  // [calls]
    std::vector<Move> moves_;        // [transfers]
};

// Splits a state into parts that threads can take one after the other.
std::vector<State> split(Worker& worker, const State& root, std::size_t wanted, const Shared& shared) {
    std::vector<State> open = {root};
    while (!open.empty() && open.size() < wanted && !shared.is_over()) {
        State state = std::move(open.front());
        open.erase(open.begin());
        const auto [call, choices] = worker.branch(state);
        for (const Domain& choice : choices) {
            open.push_back(state);
            open.back()[call] = choice;
        }
    }
    return open;
}

// Looks for a plan below the target everywhere; true if everything was looked at.
bool exhaust(Shared& shared, std::vector<Worker>& workers, State& root) {
    if (!workers[0].filter(root)) return !shared.is_over();
    if (workers.size() == 1) {
        workers[0].search(root);
        return !shared.is_over();
    }
    const std::vector<State> jobs = split(workers[0], root, workers.size() * kJobsPerThread, shared);
    shared.next_job = 0;
    on_threads(static_cast<int>(workers.size()), [&](int number) {
        for (std::size_t i; (i = shared.next_job++) < jobs.size() && !shared.is_over();) {
            workers[number].search(jobs[i]);
        }
    });
    return !shared.is_over();
}

}  // namespace

double lower_bound(const Problem& problem, const Plan& chosen, double limit) {
    const std::atomic<bool> is_stopped{false};
    const ExactLimits none{is_stopped};
    Incumbent unknown;
    Shared shared(problem, none, unknown, std::isfinite(limit) ? limit : 1);
    State state;
    for (std::size_t call = 0; call < chosen.size(); ++call) {
        state.push_back(chosen[call] < 0 ? shared.groups.all(call) : Domain{Level::option, {chosen[call]}});
    }
    return Worker(shared).bound_of(state, limit * problem.steps) / problem.steps;
}

Certificate prove(const Problem& problem, const ExactLimits& limits, Incumbent& incumbent) {
    Shared shared(problem, limits, incumbent, std::isfinite(incumbent.cost()) ? incumbent.cost() : 1);
    std::vector<Worker> workers;
    for (int i = 0; i < std::max(1, limits.threads); ++i) workers.emplace_back(shared);

    State whole;
    for (int call = 0; call < static_cast<int>(problem.calls.size()); ++call) whole.push_back(shared.groups.all(call));
    double lower = workers[0].bound_of(whole, kInfinity);
    bool proven = false;
    std::int64_t allowed = kFirstAttempt;
    double part = 0.5;
    while (!proven && !shared.out_of_budget && lower < kInfinity) {
        if (limits.between) limits.between();
        const double best = incumbent.cost() * problem.steps;  // infinite as long as no plan is known that fits
        const double gap = best - lower;
        const bool is_last = part >= 1 || best == kInfinity;
        // Whole where all times are: the limit is half a unit below.
        const double middle = lower + gap * part;
        const double target = is_last ? best : shared.is_whole ? std::ceil(middle) : middle;
        shared.target = target;
        shared.attempt_until = shared.bounds > limits.bounds - allowed ? limits.bounds : shared.bounds + allowed;
        shared.attempt_is_over = false;
        State root = whole;
        if (exhaust(shared, workers, root)) {
            const double now = incumbent.cost() * problem.steps;
            proven = is_last || now <= target;
            lower = std::max(lower, std::min(target, now));
            part = now - lower <= kLastGap * now ? 1 : std::min(2 * part, 0.5);
        } else if (part > kLeastPart && best < kInfinity) {
            part /= 4;
        } else {
            part = 0.25;
            allowed = allowed > limits.bounds / kAttemptGrowth ? limits.bounds : allowed * kAttemptGrowth;
        }
    }
    const double best = incumbent.cost() * problem.steps;
    // Two makespans that differ by less than the slack were not told apart.
    if (!shared.is_whole) lower *= 1 - 2 * kSlack;
    if (shared.is_whole && lower < kInfinity) lower = std::ceil(lower - 1e-6 * std::max(1.0, lower * 1e-9));
    Certificate certificate{std::min(lower, best), proven || lower >= best, {}};
    for (const Worker& worker : workers) certificate.counts.add(worker.counts());
    return certificate;
}

}  // namespace realhf::search
