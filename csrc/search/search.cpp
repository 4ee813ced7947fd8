// Metropolis-Hastings over execution plans (ReaL, section 5.2), with replicas at several temperatures.
#include "search.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>

#include "random.h"

namespace realhf::search {
namespace {

constexpr int kReplicas = 8;
constexpr double kColdBeta = 300;  // in units of 1 / (time of the first plan): 1 % worse is accepted with exp(-3)
constexpr double kHotBeta = 6;
constexpr int kRoundsBetweenSwaps = 8;
constexpr std::int64_t kEvaluationsBetweenClocks = 512;

// A draw for the acceptance test: exp(-beta x increase) >= u  <=>  increase <= -log(u) / beta.
double accepted_increase(Random& random, double beta) { return -std::log(1.0 - random.uniform()) / beta; }

// What the time of a plan with this peak is multiplied by.
double factor_of(const Problem& problem, double peak_bytes) {
    if (peak_bytes <= problem.device_memory_bytes) return 1.0;
    return kInfeasibleFactor * peak_bytes / problem.device_memory_bytes;
}

// The limits of a search, and the best plan within them.
class Search {
public:
    Search(const Problem& problem, const HeuristicLimits& limits, Progress& progress, Incumbent& incumbent)
        : problem_(problem), limits_(limits), progress_(progress), incumbent_(incumbent) {}

    const Searched& found() const { return found_; }
    std::int64_t evaluations() const { return found_.counts.total(); }

    bool exhausted(std::int64_t until = std::numeric_limits<std::int64_t>::max()) {
        const std::int64_t used = evaluations();
        if (used >= std::min(until, limits_.evaluations)) return true;
        if (used >= next_clock_) {
            next_clock_ = used + kEvaluationsBetweenClocks;
            progress_.evaluations += used - reported_;
            reported_ = used;
            stopped_ = progress_.stop.load(std::memory_order_relaxed) || incumbent_.seconds() >= limits_.until_s;
        }
        return stopped_;
    }

    // The plan's cost; infinity when it is above `limit`, which is often known before the simulation has ended.
    double cost(Simulator& simulator, const Plan& plan, double limit) {
        const double peak = simulator.peak_bytes(plan);
        const double factor = factor_of(problem_, peak);
        const double makespan = simulator.makespan(plan, limit / factor * problem_.steps);
        ++(makespan < kInfinity ? found_.counts.full : found_.counts.rejected);
        const double cost = factor * makespan / problem_.steps;
        const bool fits = factor == 1.0;
        if (makespan < kInfinity && is_better(fits, cost, found_.fits, found_.cost)) {
            found_ = {plan, fits, cost, found_.counts};
            if (cost < incumbent_.cost()) incumbent_.offer(plan, fits, cost);
            if (fits) progress_.offer(cost);
        }
        return cost;
    }

private:
    const Problem& problem_;
    const HeuristicLimits& limits_;
    Progress& progress_;
    Incumbent& incumbent_;
    Searched found_;
    std::int64_t reported_ = 0;
    std::int64_t next_clock_ = 0;
    bool stopped_ = false;
};

// Takes the best option of one call after the other until no call improves, or the search is exhausted.
void descend(Search& search, Simulator& simulator, const Moves& moves, Plan plan, std::int64_t until) {
    double current = search.cost(simulator, plan, kInfinity);
    const int n = static_cast<int>(plan.size());
    for (int unchanged = 0, call = 0; unchanged < n; call = (call + 1) % n) {
        ++unchanged;
        const int before = plan[call];
        int chosen = before;
        for (int option : moves.frontier(call)) {
            if (option == before) continue;
            if (search.exhausted(until)) return;
            plan[call] = option;
            const double cost = search.cost(simulator, plan, current);
            if (cost < current) current = cost, chosen = option, unchanged = 0;
        }
        plan[call] = chosen;
    }
}

struct Replica {
    Plan plan;
    double cost;
    double beta;
    Random random;
    std::unique_ptr<Simulator> simulator;  // its own: successive plans differ in a call or two
};

// One chain per temperature. The proposals are not symmetric, so that a chain's stationary law is only near
// exp(-beta cost); what counts is the best plan on the way.
class Tempering {
public:
    Tempering(const Problem& problem, const Preparation& prepared, Search& search, std::uint64_t seed)
        : prepared_(prepared), search_(search), swaps_(Random(seed ^ 0x5851F42D4C957F2DULL).next()) {
        Random seeds(seed);
        const int replicas = prepared.single_moves ? 1 : kReplicas;
        for (int r = 0; r < replicas; ++r) {
            const double beta = kColdBeta * std::pow(kHotBeta / kColdBeta, static_cast<double>(r) / (kReplicas - 1));
            replicas_.push_back(
                {{}, kInfinity, beta / prepared.unit, Random(seeds.next()), std::make_unique<Simulator>(problem)});
        }
    }

    // Puts every replica onto one of the plans, in turn.
    void start(const std::vector<Plan>& starts) {
        for (std::size_t r = 0; r < replicas_.size(); ++r) {
            replicas_[r].plan = starts[r % starts.size()];
            replicas_[r].cost = search_.cost(*replicas_[r].simulator, replicas_[r].plan, kInfinity);
        }
    }

    void run(std::int64_t until) {
        for (; !search_.exhausted(until); ++round_) {
            for (Replica& replica : replicas_) {
                if (search_.exhausted(until)) return;
                step(replica);
            }
            if (round_ % kRoundsBetweenSwaps == 0) swap_neighbours();
        }
    }

private:
    void step(Replica& replica) {
        const Moves& moves = prepared_.moves;
        const Change change = prepared_.single_moves ? moves.single(replica.plan, replica.random)
                                                     : moves.coupled(replica.plan, replica.random);
        const double limit = replica.cost + accepted_increase(replica.random, replica.beta);
        // An unchanged proposal counts, too, so that a problem with one plan comes to an end.
        const double cost = search_.cost(*replica.simulator, replica.plan, limit);
        if (cost <= limit) {
            replica.cost = cost;
        } else {
            change.undo(replica.plan);
        }
    }

    void swap_neighbours() {
        for (std::size_t i = 0; i + 1 < replicas_.size(); ++i) {
            Replica& cold = replicas_[i];
            Replica& hot = replicas_[i + 1];
            const double gain = (cold.beta - hot.beta) * (cold.cost - hot.cost);
            if (std::log(1.0 - swaps_.uniform()) > gain) continue;
            std::swap(cold.plan, hot.plan);
            std::swap(cold.cost, hot.cost);
            std::swap(cold.simulator, hot.simulator);
        }
    }

    const Preparation& prepared_;
    Search& search_;
    std::vector<Replica> replicas_;
    Random swaps_;
    std::int64_t round_ = 1;
};

// Every call in the layout of a random option of a random one, if it can be, else as in `plan`.
Plan alike_plan(const Problem& problem, Plan plan, Random& random) {
    const std::vector<Option>& some = problem.calls[random.below(problem.calls.size())].options;
    const Option& wanted = some[random.below(some.size())];
    for (std::size_t i = 0; i < plan.size(); ++i) {
        const std::vector<Option>& options = problem.calls[i].options;
        double least = kInfinity;
        for (std::size_t k = 0; k < options.size(); ++k) {
            if (!options[k].same_layout(wanted) || problem.alone_bytes(options[k]) >= least) continue;
            least = problem.alone_bytes(options[k]);
            plan[i] = static_cast<int>(k);
        }
    }
    return plan;
}

Plan random_plan(const Problem& problem, Random& random) {
    Plan plan;
    for (const Call& call : problem.calls) plan.push_back(random.below(call.options.size()));
    return plan;
}

}  // namespace

Evaluation evaluate(Simulator& simulator, const Plan& plan) {
    const Problem& problem = simulator.problem();
    const double peak = simulator.peak_bytes(plan), step_time = simulator.makespan(plan) / problem.steps;
    return {step_time, peak, peak <= problem.device_memory_bytes, factor_of(problem, peak) * step_time};
}

Plan greedy_plan(const Problem& problem) {
    Plan plan;
    for (const Call& call : problem.calls) {
        int best = 0;
        const auto key = [&](int i) {
            const Option& option = call.options[i];
            const bool fits = problem.alone_bytes(option) <= problem.device_memory_bytes;
            return std::make_tuple(!fits, fits ? option.time : problem.alone_bytes(option));
        };
        for (int i = 1; i < static_cast<int>(call.options.size()); ++i) {
            if (key(i) < key(best)) best = i;
        }
        plan.push_back(best);
    }
    return plan;
}

Plan smallest_plan(const Problem& problem, std::uint64_t seed) {
    Simulator simulator(problem, 1);
    Random random(seed);
    const auto need = [&](const Plan& plan) {
        const double peak = simulator.peak_bytes(plan);
        return std::make_pair(peak, simulator.total_bytes(plan));
    };
    Plan best = greedy_plan(problem);
    auto best_need = need(best);
    const int n = static_cast<int>(best.size());
    // Where communicators count, calls of one layout share them, and one call alone gains nothing by leaving it.
    const int alike = problem.communicator_bytes > 0 ? 3 : 0;
    for (int restart = 0; restart < 6 + alike; ++restart) {
        Plan plan = best;
        if (restart >= 6) {
            for (int draw = 0; draw < 32; ++draw) {
                const Plan drawn = alike_plan(problem, best, random);
                if (draw == 0 || need(drawn) < need(plan)) plan = drawn;
            }
        } else if (restart > 0) {
            plan = random_plan(problem, random);
        }
        auto current = need(plan);
        for (int unchanged = 0, call = 0; unchanged < n; call = (call + 1) % n) {
            ++unchanged;
            int chosen = plan[call];
            for (int option = 0; option < static_cast<int>(problem.calls[call].options.size()); ++option) {
                plan[call] = option;
                if (simulator.peak_bytes(plan) > current.first) continue;
                const auto candidate = need(plan);
                if (candidate < current) current = candidate, chosen = option, unchanged = 0;
            }
            plan[call] = chosen;
        }
        if (current < best_need) best_need = current, best = plan;
    }
    return best;
}

void Incumbent::offer(const Plan& plan, bool fits, double cost) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool known_fits = this->cost() < kInfinity;
    if (!plan_.empty() && !is_better(fits, cost, known_fits, plan_cost_)) return;
    plan_ = plan;
    plan_cost_ = cost;
    if (!fits) return;
    cost_.store(cost, std::memory_order_relaxed);
    trace_.emplace_back(seconds(), cost);
}

Plan Incumbent::plan() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return plan_;
}

std::vector<std::pair<double, double>> Incumbent::trace() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return trace_;
}

Preparation::Preparation(const Problem& problem, const SolveOptions& options, Progress& progress)
    : single_moves(options.single_moves), progress(progress), moves(problem), unit(0) {
    Simulator simulator(problem);
    std::vector<std::pair<Evaluation, Plan>> rated;
    for (const Plan& plan : options.starts) rated.emplace_back(evaluate(simulator, plan), plan);
    std::stable_sort(rated.begin(), rated.end(), [](const auto& one, const auto& other) {
        return is_better(one.first.feasible, one.first.cost, other.first.feasible, other.first.cost);
    });
    for (const auto& [evaluation, plan] : rated) starts.push_back(plan);
    starts.push_back(greedy_plan(problem));
    const Evaluation greedy = evaluate(simulator, starts.back());
    unit = std::max(greedy.step_time, 1e-12);
    const bool any_fits = greedy.feasible || (!rated.empty() && rated.front().first.feasible);
    if (!any_fits) starts.push_back(smallest_plan(problem, options.seed));
}

Searched heuristic_search(const Problem& problem, const Preparation& prepared, std::uint64_t seed,
                          const HeuristicLimits& limits, Incumbent& incumbent) {
    const Moves& moves = prepared.moves;
    Search search(problem, limits, prepared.progress, incumbent);
    Simulator simulator(problem);
    Random random(seed ^ 0x2545F4914F6CDD1DULL);
    std::vector<Plan> starts = prepared.starts;
    if (const Plan known = incumbent.plan(); !known.empty()) starts.insert(starts.begin(), known);
    Tempering tempering(problem, prepared, search, seed);
    if (prepared.single_moves) {
        tempering.start({starts.back()});
        tempering.run(std::numeric_limits<std::int64_t>::max());
        return search.found();
    }

    const std::int64_t budget = limits.evaluations;
    for (const Plan& start : starts) descend(search, simulator, moves, start, budget / 4);
    starts.insert(starts.begin(), search.found().plan);
    // Half of the chains look beside the best at once; a small budget is over before a second round.
    if (random.uniform() < 0.5) starts.push_back(moves.divided(random));
    // Rounds of growing length: temper from the best and from others, descend from what was found, and from a plan of
    // which half is redrawn.
    std::int64_t length = 40000;
    for (int round = 0; !search.exhausted(); ++round, length += length / 2) {
        const bool is_last = search.evaluations() + 2 * length >= budget;
        const std::int64_t end = is_last ? budget - budget / 8 : search.evaluations() + length;
        if (round > 0) starts = {search.found().plan, moves.divided(random), random_plan(problem, random)};
        tempering.start(starts);
        tempering.run(end);
        descend(search, simulator, moves, search.found().plan, budget);
        for (int restart = 0; restart < 4 && !search.exhausted(); ++restart) {
            Plan plan = search.found().plan;
            for (std::size_t call = 0; call < plan.size(); ++call) {
                if (random.uniform() < 0.5) plan[call] = random.pick(moves.frontier(static_cast<int>(call)));
            }
            descend(search, simulator, moves, plan, search.evaluations() + length / 8);
        }
        if (is_last) tempering.run(budget);
    }
    return search.found();
}

}  // namespace realhf::search
