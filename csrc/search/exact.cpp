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

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kBoundsBetweenClocks = 64;
constexpr std::size_t kJobsPerThread = 64;

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

// What the threads of one proof share.
struct Shared {
    const Problem& problem;
    const Groups& groups;
    const std::vector<Segment>& segments;
    const ExactLimits& limits;
    Incumbent& incumbent;
    const double slack;  // relative difference below which two makespans are the same, or less than 1 where all are whole
    const bool is_whole;
    std::atomic<double> target{kInfinity};  // looking for a makespan below
    std::atomic<std::int64_t> bounds{0};
    std::atomic<bool> out_of_budget{false};
    std::atomic<std::size_t> next_job{0};

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
          bound_(shared.problem, shared.segments),
          simulator_(shared.problem),
          num_calls_(static_cast<int>(shared.problem.calls.size())) {}

    const Counts& counts() const { return counts_; }

    // Takes from every domain what a bound excludes, until nothing changes; false if a domain becomes empty.
    bool filter(State& state) {
        if (!look(state)) return false;
        for (int call = 0, unchanged = 0; unchanged < num_calls_; call = (call + 1) % num_calls_) {
            ++unchanged;
            if (shared_.out_of_budget) return true;
            Domain& domain = state[call];
            if (domain.choices.size() == 1 && domain.is_placed) continue;
            const std::size_t before = domain.choices.size();
            const Outlook outlook = outlooks_[call];
            std::vector<Choice> kept;
            for (const Choice& choice : domain.choices) {
                outlooks_[call] = groups_.outlook(call, choice);
                settled_[call] = &choice;
                find_transfers(call);
                if (bound() <= shared_.limit()) kept.push_back(choice);
            }
            settled_[call] = nullptr;
            outlooks_[call] = outlook;
            if (kept.empty()) return false;
            const bool opens = kept.size() == 1 && !domain.is_placed;
            if (opens) {
                domain = groups_.opened(call, kept.front().group);
            } else {
                domain.choices = std::move(kept);
            }
            if (domain.choices.size() != before || opens) {
                unchanged = 0;
                if (!look(state)) return false;
            } else {
                settle(state, call);
                find_transfers(call);
            }
        }
        return true;
    }

    // Where to branch next: a mesh before a strategy, few choices before many. -1: everything is chosen.
    int branching_call(const State& state) const {
        int best = -1;
        auto best_key = std::make_tuple(false, std::size_t{0}, 0.0);
        for (int call = 0; call < num_calls_; ++call) {
            if (state[call].is_placed && state[call].choices.size() == 1) continue;
            const auto key = std::make_tuple(state[call].is_placed, state[call].choices.size(),
                                             -groups_.outlook(call, state[call]).time);
            if (best < 0 || key < best_key) best = call, best_key = key;
        }
        return best;
    }

    // The choices of a call, the one with the lowest bound first, and of those that mirror one another only one.
    std::vector<Choice> branches(const State& state, int call) {
        std::vector<std::pair<double, Choice>> rated;
        if (!look(state)) return {};
        for (const Choice& choice : state[call].choices) {
            if (choice.option < 0 && groups_.is_mirrored(call, choice.group, state)) continue;
            outlooks_[call] = groups_.outlook(call, choice);
            settled_[call] = &choice;
            find_transfers(call);
            const double bound = this->bound();
            if (bound <= shared_.limit()) rated.emplace_back(bound, choice);
        }
        std::stable_sort(rated.begin(), rated.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        std::vector<Choice> result;
        for (const auto& [_, choice] : rated) result.push_back(choice);
        return result;
    }

    void choose(State& state, int call, const Choice& choice) const {
        if (choice.option < 0) {
            state[call] = groups_.opened(call, choice.group);
        } else {
            state[call].choices = {choice};
        }
    }

    void search(State state) {
        if (shared_.out_of_budget || !filter(state) || shared_.out_of_budget) return;
        const int call = branching_call(state);
        if (call < 0) return try_plan(state);
        for (const Choice& choice : branches(state, call)) {
            if (shared_.out_of_budget) return;
            State next = state;
            choose(next, call, choice);
            search(std::move(next));
        }
    }

    void try_plan(const State& state) {
        Plan plan;
        for (const Domain& domain : state) plan.push_back(domain.choices.front().option);
        if (simulator_.peak_bytes(plan) > shared_.problem.device_memory_bytes) return;
        const double limit = shared_.incumbent.cost() * shared_.problem.steps;
        const double makespan = simulator_.makespan(plan, limit);
        ++(makespan < kInfinity ? counts_.full : counts_.rejected);
        if (makespan < limit) shared_.incumbent.offer(plan, true, makespan / shared_.problem.steps);
    }

    // The bound on all plans of a state, with nothing excluded.
    double root_bound(const State& state) {
        for (int call = 0; call < num_calls_; ++call) settle(state, call);
        transfers_.assign(shared_.problem.transfers.size(), 0.0);
        for (int call = 0; call < num_calls_; ++call) find_transfers(call);
        return bound_(outlooks_, transfers_, kInfinity);
    }

private:
    void settle(const State& state, int call) {
        outlooks_.resize(num_calls_);
        settled_.resize(num_calls_);
        unsettled_.resize(num_calls_);
        outlooks_[call] = groups_.outlook(call, state[call]);
        const Domain& domain = state[call];
        settled_[call] = nullptr;
        if (domain.is_placed) {
            unsettled_[call] = domain.choices.size() == 1 ? domain.choices.front()
                                                          : Choice{domain.choices.front().group, -1};
            settled_[call] = &unsettled_[call];
        }
    }

    // Looks at a whole state; false if its bound is above the limit.
    bool look(const State& state) {
        for (int call = 0; call < num_calls_; ++call) settle(state, call);
        transfers_.assign(shared_.problem.transfers.size(), 0.0);
        for (int call = 0; call < num_calls_; ++call) find_transfers(call);
        return bound() <= shared_.limit();
    }

    void find_transfers(int call) {
        for (std::size_t i = 0; i < transfers_.size(); ++i) {
            const Transfer& transfer = shared_.problem.transfers[i];
            if (transfer.source != call && transfer.target != call) continue;
            const Choice* source = settled_[transfer.source];
            const Choice* target = settled_[transfer.target];
            transfers_[i] = source && target ? groups_.least_transfer(static_cast<int>(i), *source, *target) : 0.0;
        }
    }

    double bound() {
        if (++pending_ >= kBoundsBetweenClocks) {
            const std::int64_t used = shared_.bounds.fetch_add(pending_) + pending_;
            pending_ = 0;
            const ExactLimits& limits = shared_.limits;
            if (used >= limits.bounds || (limits.stop && limits.stop->load()) ||
                (limits.until_s < kInfinity && shared_.incumbent.seconds() >= limits.until_s)) {
                shared_.out_of_budget = true;
            }
        }
        return bound_(outlooks_, transfers_, shared_.limit());
    }

    Shared& shared_;
    const Groups& groups_;
    Bound bound_;
    Simulator simulator_;
    const int num_calls_;
    Counts counts_;
    std::int64_t pending_ = 0;
    std::vector<Outlook> outlooks_;        // [calls]
    std::vector<const Choice*> settled_;   // [calls] what the call's mesh, at least, is known by; else null
    std::vector<Choice> unsettled_;        // [calls]
    std::vector<double> transfers_;        // [transfers] least times
};

// Splits a state into parts that threads can take one after the other.
std::vector<State> split(Worker& worker, const State& root, std::size_t wanted, const Shared& shared) {
    std::vector<State> open = {root}, closed;
    while (!open.empty() && open.size() + closed.size() < wanted && !shared.out_of_budget) {
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
    if (!workers[0].filter(root)) return !shared.out_of_budget;
    if (workers.size() == 1) {
        workers[0].search(root);
        return !shared.out_of_budget;
    }
    const std::vector<State> jobs = split(workers[0], root, workers.size() * kJobsPerThread, shared);
    shared.next_job = 0;
    on_threads(static_cast<int>(workers.size()), [&](int number) {
        for (std::size_t i; (i = shared.next_job++) < jobs.size() && !shared.out_of_budget;) {
            workers[number].search(jobs[i]);
        }
    });
    return !shared.out_of_budget;
}

}  // namespace

Certificate prove(const Problem& problem, const ExactLimits& limits, Incumbent& incumbent) {
    const std::vector<Segment> segments = segments_of(problem);
    const Groups groups(problem);
    Shared shared{problem, groups, segments, limits, incumbent, 1e-9, all_times_are_whole(problem)};
    std::vector<Worker> workers;
    for (int i = 0; i < std::max(1, limits.threads); ++i) workers.emplace_back(shared);

    State whole;
    for (int call = 0; call < static_cast<int>(problem.calls.size()); ++call) whole.push_back(groups.all(call));
    double lower = workers[0].root_bound(whole);
    bool proven = false;
    while (!proven && !shared.out_of_budget && lower < kInfinity) {
        const double best = incumbent.cost() * problem.steps;  // infinite as long as no plan is known that fits
        const double gap = best - lower;
        const bool is_last = best == kInfinity || gap <= 0.004 * best;
        // Whole where all times are: the limit is half a unit below.
        const double middle = lower + gap / 2;
        const double target = is_last ? best : shared.is_whole ? std::ceil(middle) : middle;
        shared.target = target;
        State root = whole;
        if (!exhaust(shared, workers, root)) break;
        const double now = incumbent.cost() * problem.steps;
        proven = is_last || now <= target;
        lower = std::max(lower, std::min(target, now));
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
