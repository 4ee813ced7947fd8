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
constexpr double kLeastPart = 1.0 / 64;  // of the gap
constexpr double kNegligible = 1e-4;    // of a step: transfers that take less are not looked at
constexpr double kLastGap = 0.004;       // which is closed at once, if it can be

using State = std::vector<Domain>;  // [calls]

std::vector<double> prices_of(const Problem& problem, double step) {
    std::vector<double> prices;
    for (int k = 0; k < kPrices; ++k) prices.push_back(std::ldexp(step / problem.device_memory_bytes, -k));
    return prices;
}

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

// What the threads of one proof share.
struct Shared {
    const Problem& problem;
    const Groups& groups;
    const std::vector<Segment>& segments;
    const std::vector<double>& prices;
    const ExactLimits& limits;
    Incumbent& incumbent;
    const double slack;  // relative difference below which two makespans are the same, or less than 1 where all are whole
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
        if (used >= limits.bounds || (limits.stop && limits.stop->load()) ||
            (limits.until_s < kInfinity && incumbent.seconds() >= limits.until_s)) {
            out_of_budget = true;
        }
        if (out_of_budget || used >= attempt_until) attempt_is_over = true;
    }

    double limit() const {
        const double below = std::min(target.load(std::memory_order_relaxed), incumbent.cost() * problem.steps);
        return is_whole ? below - 0.5 : below * (1 - slack);
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

    // Takes from every domain what a bound excludes, until nothing changes; false if a domain becomes empty.
    bool filter(State& state) {
        if (!look(state)) return false;
        for (int call = 0, unchanged = 0; unchanged < num_calls_; call = (call + 1) % num_calls_) {
            ++unchanged;
            if (shared_.is_over()) return true;
            Domain& domain = state[call];
            if (domain.is_settled()) continue;
            std::vector<int> kept;
            for (std::size_t i = 0; i < domain.numbers.size(); ++i) {
                look_at(state, call, domain.choice(i));
                if (bound() <= shared_.limit()) kept.push_back(domain.numbers[i]);
            }
            if (kept.empty()) return false;
            const bool opens = kept.size() == 1 && domain.level != Level::option;
            const bool changed = opens || kept.size() != domain.numbers.size();
            if (opens) {
                domain = groups_.opened(call, {domain.level, kept.front()});
            } else {
                domain.numbers = std::move(kept);
            }
            if (changed) unchanged = 0;
            settle(state, call);
            if (changed && bound() > shared_.limit()) return false;
        }
        return true;
    }

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
    std::vector<Choice> branches(const State& state, int call) {
        std::vector<std::pair<double, Choice>> rated;
        if (!look(state)) return {};
        for (std::size_t i = 0; i < state[call].numbers.size(); ++i) {
            const Choice choice = state[call].choice(i);
            if (choice.level == Level::mesh && groups_.is_mirrored(call, choice.number, state)) continue;
            look_at(state, call, choice);
            const double bound = this->bound();
            if (bound <= shared_.limit()) rated.emplace_back(bound, choice);
        }
        std::stable_sort(rated.begin(), rated.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        std::vector<Choice> result;
        for (const auto& [_, choice] : rated) result.push_back(choice);
        return result;
    }

    void choose(State& state, int call, const Choice& choice) const {
        if (choice.level == Level::option) {
            state[call].numbers = {choice.number};
        } else {
            state[call] = groups_.opened(call, choice);
        }
    }

    void search(State state) {
        if (shared_.is_over() || !filter(state) || shared_.is_over()) return;
        const int call = branching_call(state);
        if (call < 0) return try_plan(state);
        for (const Choice& choice : branches(state, call)) {
            if (shared_.is_over()) return;
            State next = state;
            choose(next, call, choice);
            search(std::move(next));
        }
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

    // The bound on all plans of a state, with nothing excluded.
    double root_bound(const State& state) {
        settle_all(state);
        return bound_(outlooks_, moves_, kInfinity);
    }

private:
    // What is known of a call, and of what is moved to and from it, under a state; with one of its choices.
    void settle(const State& state, int call) {
        outlooks_[call] = groups_.outlook(call, state[call]);
        find_moves(state, call, state[call]);
    }

    void look_at(const State& state, int call, const Choice& choice) {
        outlooks_[call] = groups_.outlook(call, choice);
        find_moves(state, call, choice);
    }

    template <typename Chosen>
    void find_moves(const State& state, int call, const Chosen& chosen) {
        for (int i : groups_.transfers_of(call)) {
            const Transfer& transfer = shared_.problem.transfers[i];
            if (transfer.source == transfer.target) {
                moves_[i] = groups_.least(i, chosen, chosen);
            } else if (transfer.source == call) {
                moves_[i] = groups_.least(i, chosen, state[transfer.target]);
            } else {
                moves_[i] = groups_.least(i, state[transfer.source], chosen);
            }
        }
    }

    void settle_all(const State& state) {
        for (int call = 0; call < num_calls_; ++call) settle(state, call);
    }

    // Looks at a whole state; false if its bound is above the limit.
    bool look(const State& state) {
        settle_all(state);
        return bound() <= shared_.limit();
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
    std::vector<State> open = {root}, closed;
    while (!open.empty() && open.size() + closed.size() < wanted && !shared.is_over()) {
        State state = std::move(open.front());
        open.erase(open.begin());
        if (!worker.filter(state)) continue;
        const int call = worker.branching_call(state);
        if (call < 0) {
            worker.try_plan(state);
            continue;
        }
        for (const Choice& choice : worker.branches(state, call)) {
            open.push_back(state);
            worker.choose(open.back(), call, choice);
        }
    }
    closed.insert(closed.end(), open.begin(), open.end());
    return closed;
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
    const double step = std::isfinite(limit) ? limit : 1;
    const std::vector<double> prices = prices_of(problem, step);
    const std::vector<Segment> segments = segments_of(problem, kNegligible * step);
    const Groups groups(problem, prices);
    State state;
    std::vector<Outlook> outlooks;
    std::vector<Move> moves;
    for (std::size_t call = 0; call < chosen.size(); ++call) {
        state.push_back(chosen[call] < 0 ? groups.all(call) : Domain{Level::option, {chosen[call]}});
        outlooks.push_back(groups.outlook(call, state[call]));
    }
    for (std::size_t i = 0; i < problem.transfers.size(); ++i) {
        const Domain &source = state[problem.transfers[i].source], &target = state[problem.transfers[i].target];
        moves.push_back(groups.least(i, source, target));
    }
    return Bound(problem, segments, prices)(outlooks, moves, limit * problem.steps) / problem.steps;
}

Certificate prove(const Problem& problem, const ExactLimits& limits, Incumbent& incumbent) {
    // Prices, and what is negligible, are relative to the plan that is known.
    const double step = std::isfinite(incumbent.cost()) ? incumbent.cost() : 1;
    const std::vector<double> prices = prices_of(problem, step);
    const std::vector<Segment> segments = segments_of(problem, kNegligible * step);
    const Groups groups(problem, prices);
    Shared shared{problem, groups, segments, prices, limits, incumbent, 1e-9, all_times_are_whole(problem)};
    std::vector<Worker> workers;
    for (int i = 0; i < std::max(1, limits.threads); ++i) workers.emplace_back(shared);

    State whole;
    for (int call = 0; call < static_cast<int>(problem.calls.size()); ++call) whole.push_back(groups.all(call));
    double lower = workers[0].root_bound(whole);
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
    if (!shared.is_whole) lower *= 1 - 2 * shared.slack;
    if (shared.is_whole && lower < kInfinity) lower = std::ceil(lower - 1e-6 * std::max(1.0, lower * 1e-9));
    Certificate certificate{std::min(lower, best), proven || lower >= best, {}};
    for (const Worker& worker : workers) certificate.counts.add(worker.counts());
    return certificate;
}

}  // namespace realhf::search
