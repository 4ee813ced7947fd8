// Tests of the simulator and the search without Python; built with sanitizers by tests/unit/planning/test_cpp.py.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <stdexcept>

#include "bounds.h"
#include "check.h"
#include "domains.h"
#include "reallocation.h"
#include "search.h"
#include "segments.h"
#include "simulator.h"
#include "solve.h"
#include "threads.h"

using namespace realhf::search;

namespace {

Option option(int first, int size, double time, double dynamic = 0, double statics = 0, int strategy = 0) {
    return {first, size, strategy, time, statics, dynamic, 0};
}

Problem problem_with(std::vector<Call> calls, int steps = 1, int in_flight = 1) {
    return {4, 100, steps, in_flight, std::move(calls), {}};
}

bool near(double a, double b) { return std::abs(a - b) < 1e-12; }

Evaluation evaluated(const Problem& problem, const Plan& plan) {
    Simulator simulator(problem);
    return evaluate(simulator, plan);
}

Solution solved(const Problem& problem, const SolveOptions& options) {
    Progress progress;
    return solve(problem, options, progress);
}

void disjoint_calls_overlap_in_time() {
    Problem problem = problem_with({{0, {}, {option(0, 2, 3)}}, {1, {}, {option(2, 2, 5), option(1, 2, 5)}}});
    problem.check();
    Simulator simulator(problem);
    CHECK(near(simulator.makespan({0, 0}), 5));
    CHECK(near(simulator.makespan({0, 1}), 8));
    CHECK(std::isinf(simulator.makespan({0, 1}, 7.9)));
    CHECK(near(simulator.makespan({0, 1}, 8.0), 8));
}

void a_transfer_occupies_both_meshes() {
    Problem problem = problem_with({{0, {}, {option(0, 2, 3)}}, {1, {{2, 0}}, {option(2, 2, 5)}}});
    problem.transfers = {{0, 1, {0, 1}, {{0, 0}}, {0}, {0}, {std::vector{2.0}, 1}, false}};
    problem.check();
    const auto events = Simulator(problem).trace({0, 0});
    CHECK(events.size() == 3 && events[1].node == 2);
    CHECK(near(events[1].start, 3) && near(events[2].start, 5) && near(events[2].end, 10));
    // A third call on the source's devices has to wait for the transfer; it would not if only the target were occupied.
    problem.calls.push_back({2, {{0, 0}}, {option(0, 1, 4)}});
    problem.calls[1].parents = {{3, 0}};
    CHECK(near(Simulator(problem).trace({0, 0, 0}).back().end, 14));  // the tie at 3 s goes to the call: it is node 2
}

void steps_in_flight_are_bounded() {
    // A chain of two calls of 1 s on different devices: a pipeline over the steps.
    for (const auto& [in_flight, expected] : {std::pair{1, 8.0}, std::pair{2, 5.0}, std::pair{3, 5.0}}) {
        Problem problem =
            problem_with({{0, {}, {option(0, 1, 1)}}, {1, {{0, 0}}, {option(1, 1, 1)}}}, 4, in_flight);
        CHECK(near(Simulator(problem).makespan({0, 0}), expected));
    }
}

void memory_counts_everything_on_a_device() {
    Problem problem = problem_with({{0, {}, {option(0, 2, 1, 10, 50)}},
                                    {0, {}, {option(1, 2, 1, 30, 0), option(2, 2, 1, 30, 0), option(0, 2, 1, 30, 0)}},
                                    {2, {}, {option(1, 1, 1, 5, 7)}}});
    for (Option& o : problem.calls[1].options) o.copy_bytes = 4;
    Simulator simulator(problem);
    CHECK(near(simulator.peak_bytes({0, 0, 0}), 50 + 7 + 34));  // device 1
    CHECK(near(simulator.total_bytes({0, 0, 0}), 60 + 91 + 34));
    CHECK(near(simulator.peak_bytes({0, 1, 0}), 50 + 7 + 10));
    CHECK(near(simulator.peak_bytes({0, 2, 0}), 50 + 7 + 30));  // at home there is no copy
}

void communicators_count_once_on_a_device() {
    // Labels: 0 of all devices, 2 and 3 of some; 1 where a copy moves.
    Problem problem = problem_with({{0, {}, {option(0, 2, 1)}}, {1, {}, {option(1, 2, 1)}},
                                    {0, {}, {option(0, 2, 1), option(2, 2, 1)}}});
    problem.communicators = {{}, {0, 2}, {0, 3}};
    problem.communicator_bytes = 10;
    for (Call& call : problem.calls) {
        for (Option& o : call.options) o.communicators = 1;
    }
    problem.calls[1].options[0].communicators = 2;
    problem.check();
    Simulator simulator(problem);
    CHECK(near(simulator.peak_bytes({0, 0, 0}), 30));   // device 1: labels 0, 2 and 3
    CHECK(near(simulator.total_bytes({0, 0, 0}), 20 + 30 + 20));
    CHECK(near(simulator.peak_bytes({0, 0, 1}), 40));   // and of moves
    CHECK(near(simulator.total_bytes({0, 0, 1}), 30 + 40 + 40 + 30));
    problem.sending_bytes = 5;  // devices 0 and 1 send to 2 and 3
    CHECK(near(Simulator(problem).total_bytes({0, 0, 0}), 70));
    CHECK(near(Simulator(problem).total_bytes({0, 0, 1}), 150));
}

void cycles_are_refused() {
    Problem problem = problem_with({{0, {{1, 0}}, {option(0, 1, 1)}}, {1, {{0, 0}}, {option(0, 1, 1)}}});
    bool refused = false;
    try {
        problem.check();
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
    problem.calls[0].parents = {{1, 1}};
    problem.check();
}

// A deterministic stand-in for random numbers.
struct Lcg {
    unsigned state;
    int below(int n) { return static_cast<int>((state = state * 1664525u + 1013904223u) >> 8) % n; }
};

Problem random_problem(unsigned seed) {
    Lcg lcg{seed};
    Problem problem = problem_with({}, 3, 2);
    for (int i = 0; i < 3; ++i) {
        Call call{i == 2 ? 0 : i, {}, {}};
        for (int k = 0; k < 6; ++k) {
            const int size = 1 << lcg.below(3), first = size * lcg.below(4 / size);
            Option o = option(first, size, 1 + lcg.below(20), lcg.below(60), lcg.below(40), lcg.below(2));
            o.copy_bytes = lcg.below(20);
            call.options.push_back(o);
        }
        if (i > 0) call.parents = {{i - 1, 0}};
        problem.calls.push_back(call);
    }
    problem.calls[0].parents = {{2, 1}};
    std::vector<double> times;
    for (int i = 0; i < 36; ++i) times.push_back(lcg.below(5));
    problem.transfers.push_back({0, 2, {0, 2}, {{0, 0}}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}, {times, 6}, false});
    problem.calls[2].parents.push_back({3, 0});
    problem.check();
    return problem;
}

void search_finds_the_optimum_of_small_problems() {
    for (unsigned seed = 0; seed < 20; ++seed) {
        const Problem problem = random_problem(seed);
        double optimum = 1e300;
        for (int a = 0; a < 6; ++a) {
            for (int b = 0; b < 6; ++b) {
                for (int c = 0; c < 6; ++c) optimum = std::min(optimum, evaluated(problem, {a, b, c}).cost);
            }
        }
        const Solution first = solved(problem, {seed, 3000, 0, 1, false, true});
        const Solution second = solved(problem, {seed, 3000, 0, 2, false, true});
        CHECK(near(first.evaluation.cost, optimum));
        CHECK(first.plan == second.plan && first.search_counts.total() == second.search_counts.total());
        CHECK(first.search_counts.total() <= 3000);
        CHECK(!first.evaluation.feasible || (first.proven && near(first.lower_bound, optimum)));
        if (seed < 3) {  // time enough on a busy machine; the proof ends it
            const Solution by_time = solved(problem, {seed, 0, 60.0, 4, false, true});
            CHECK(near(by_time.evaluation.cost, optimum) && by_time.proven);
        }
        Simulator simulator(problem);
        for (int option = 0; option < 6; ++option) {
            const Plan plan{first.plan[0], option, first.plan[2]};
            const Evaluation again = evaluate(simulator, plan), once = evaluated(problem, plan);
            CHECK(again.cost == once.cost && again.feasible == once.feasible);
        }
        const double smallest = evaluated(problem, smallest_plan(problem, 0)).peak_bytes;
        CHECK(smallest <= evaluated(problem, first.plan).peak_bytes);
    }
}

void a_solution_is_no_worse_than_its_starts() {
    // A thousand plans of calls that are best far from where the search begins.
    Problem problem = problem_with({});
    for (int call = 0; call < 3; ++call) {
        std::vector<Option> options;
        for (int k = 0; k < 10; ++k) options.push_back(option(k % 4, 1, 1.0 + (7 * k + 3 * call) % 10));
        problem.calls.push_back({call, {}, options});
    }
    for (int k = 0; k < 10; ++k) {
        const std::vector<Plan> starts = {{k, k, k}, {9 - k, k, 5}, {1, 2, k}};
        for (const SolveOptions& options : {SolveOptions{1, 1, 0, 2, false, false, starts},
                                            SolveOptions{1, 0, 1e-9, 2, false, true, starts}}) {
            const Solution solution = solved(problem, options);
            for (const Plan& start : starts) CHECK(solution.evaluation.cost <= evaluated(problem, start).cost);
        }
    }
}

void what_a_thread_throws_is_thrown_again() {
    std::atomic<int> done{0};
    bool thrown = false;
    try {
        on_threads(3, [&](int i) {
            ++done;
            if (i == 2) throw std::bad_alloc();
        });
    } catch (const std::bad_alloc&) {
        thrown = true;
    }
    CHECK(thrown && done == 3);
}

void barriers_split_the_graph() {
    // A chain of two calls, one step after the other: every node is a part, each of three steps alike.
    const std::vector<Call> chain = {{0, {}, {option(0, 1, 1)}}, {1, {{0, 0}}, {option(1, 1, 1)}}};
    const auto parts = segments_of(problem_with(chain, 3, 1));
    CHECK(parts.size() == 2 && parts[0].repeated == 3 && parts[1].repeated == 3);
    CHECK(parts[0].nodes == std::vector<int>{0} && parts[1].nodes == std::vector<int>{1});
    // The first call of a step does not wait for the second of the step before: no barrier.
    const auto whole = segments_of(problem_with(chain, 3, 3));
    CHECK(whole.size() == 1 && whole[0].size() == 6 && whole[0].unordered.size() == 12);
}

void bounds_are_those_worked_out_by_hand() {
    // Of three calls the last waits for the first two; 4 devices.
    Problem problem = problem_with({{0, {}, {option(0, 2, 3), option(2, 2, 3)}},
                                    {1, {}, {option(0, 2, 5), option(0, 4, 4)}},
                                    {2, {{0, 0}, {1, 0}}, {option(0, 4, 2)}}});
    const auto parts = segments_of(problem);
    const std::vector<double> prices(kPrices, 0.1);
    const Groups groups(problem, prices);
    Bound bound(problem, parts, prices);
    const auto bound_of = [&](const std::vector<int>& options, double limit = 1e9) {
        std::vector<Outlook> outlooks;
        for (int call = 0; call < 3; ++call) outlooks.push_back(groups.outlook(call, {Level::option, {options[call]}}));
        return bound(outlooks, {}, limit);
    };
    const auto is = [](double a, double b) { return std::abs(a - b) < 1e-9; };
    CHECK(parts.size() == 2);
    CHECK(is(bound_of({0, 0, 0}), 3 + 5 + 2));  // both on devices 0 and 1: one after the other
    CHECK(is(bound_of({1, 0, 0}), 5 + 2));      // side by side: the longest path
    CHECK(is(bound_of({1, 1, 0}), 4 + 3 + 2));
    CHECK(std::isinf(bound_of({1, 1, 0}, 8.9)) && is(bound_of({1, 1, 0}, 9.0), 9));
    // Nothing chosen: each call takes its least time and its least device-time, (6 + 10) / 4 and 2.
    const std::vector<Outlook> open = {groups.outlook(0, groups.all(0)), groups.outlook(1, groups.all(1)),
                                       groups.outlook(2, groups.all(2))};
    CHECK(is(bound(open, {}, 1e9), 4 + 2));
    // The second half of the cluster mirrors the first for a call that has the same options on both.
    const std::vector<Domain> domains = {groups.all(0), groups.all(1), groups.all(2)};
    CHECK(!groups.is_mirrored(0, 1, domains));  // the second call has options on devices 0 and 1 only
    problem.calls[1].options[0] = option(0, 4, 5);
    CHECK(Groups(problem, prices).is_mirrored(0, 1, {groups.all(0), groups.all(1), groups.all(2)}));
    // What shares a device has to fit into its memory together.
    problem.calls[0].options[0].static_bytes = 60;
    problem.calls[1].options[0].dynamic_bytes = 50;
    const Groups tight(problem, prices);
    const std::vector<Outlook> both = {tight.outlook(0, {Level::option, {0}}), tight.outlook(1, {Level::option, {0}}),
                                       tight.outlook(2, {Level::option, {0}})};
    CHECK(std::isinf(bound(both, {}, 1e9)));
}

// A chain of two calls on all devices, each with a fast and a slow option.
Problem chain_of_two() {
    return problem_with({{0, {}, {option(0, 4, 1), option(0, 4, 3)}}, {1, {{0, 0}}, {option(0, 4, 1), option(0, 4, 5)}}});
}

double bound_of_all(const Problem& problem, double limit) {
    const std::vector<double> prices = {1.0 / 16, 1.0 / 32, 1.0 / 64, 1.0 / 128, 1.0 / 256, 1.0 / 512};
    const auto parts = segments_of(problem);
    const Groups groups(problem, prices);
    std::vector<Outlook> outlooks;
    std::vector<Move> moves;
    for (int call = 0; call < 2; ++call) outlooks.push_back(groups.outlook(call, groups.all(call)));
    for (int i = 0; i < static_cast<int>(problem.transfers.size()); ++i) {
        moves.push_back(groups.least(i, groups.all(problem.transfers[i].source), groups.all(problem.transfers[i].target)));
    }
    return Bound(problem, parts, prices)(outlooks, moves, limit);
}

void a_transfer_counts_together_with_its_ends() {
    // It takes no time between the slow options, and 10 elsewhere: 1 + 10 + 1 or 3 + 0 + 5, and not 1 + 0 + 1.
    Problem problem = chain_of_two();
    problem.transfers = {{0, 1, {1}, {{0, 0}}, {0, 1}, {0, 1}, {std::vector<double>{10, 10, 10, 0}, 2}}};
    problem.calls[1].parents = {{2, 0}};
    const double bound = bound_of_all(problem, 1e9);
    CHECK(std::abs(bound - 8) < 1e-9);
    CHECK(evaluated(problem, {1, 1}).step_time == 8 && evaluated(problem, {0, 0}).step_time == 12);
}

void memory_has_a_price() {
    // The fast options need 64 bytes each and a device has 96: one of the two is slow, at 1 + 5 or 3 + 1.
    Problem problem = chain_of_two();
    problem.device_memory_bytes = 96;
    for (Call& call : problem.calls) call.options[0].static_bytes = 64;
    // Priced at 1 / 32 a byte: 1 + 2 or 3 of the first and 1 + 2 or 5 of the second, less 96 / 32 for all memory.
    CHECK(std::isinf(bound_of_all(problem, 2.9)));
    CHECK(bound_of_all(problem, 3.1) <= 4);
}

void reallocation_counts_what_is_lacking() {
    // 4 layers of 8 sharded and 1 replicated elements; an embedding of 16; a head of 16 and 2.
    const ModelSizes model{4, 8, 1, 16, 0, 16, 2, false};
    const Links links{{0, 1}, {0, 1}, 8};  // an element takes a second
    const auto seconds = [&](const ModelLayout& source, const ModelLayout& target) {
        return Times(std::make_shared<PlacedTimes>(reallocation_times(model, {source}, {target}, links, 70, 1)), 1).at(0, 0);
    };
    const ModelLayout whole{0, {1, 1, 1, 1}}, tensor{0, {2, 1, 2, 1}}, pipeline{0, {2, 1, 1, 2}}, elsewhere{2, {1, 1, 1, 1}};
    CHECK(seconds(whole, whole) == 0);
    CHECK(seconds(whole, elsewhere) == 70);
    CHECK(seconds(whole, tensor) == 16 + 4 + 8 + 8 + 2);  // the second rank's half
    CHECK(seconds(tensor, whole) == 32);                  // the other half of every sharded parameter
    // Stage 0 has half of its two layers and of the embedding; stage 1 of its two layers and of the head. Two send 32.
    CHECK(seconds(tensor, pipeline) == 16);
    // In chunks the stages have layers 0 and 2, 1 and 3: one layer moves to each, and the embedding and head stay.
    CHECK(seconds(pipeline, {0, {2, 1, 1, 2, 2}}) == 9);
    // Two ranks divide all 70 elements: each lacks half.
    CHECK(seconds({0, {2, 2, 1, 1, 1, 2}}, {0, {2, 2, 1, 1}}) == 35);
}

}  // namespace

int main() {
    disjoint_calls_overlap_in_time();
    a_transfer_occupies_both_meshes();
    steps_in_flight_are_bounded();
    memory_counts_everything_on_a_device();
    communicators_count_once_on_a_device();
    cycles_are_refused();
    search_finds_the_optimum_of_small_problems();
    a_solution_is_no_worse_than_its_starts();
    what_a_thread_throws_is_thrown_again();
    barriers_split_the_graph();
    bounds_are_those_worked_out_by_hand();
    a_transfer_counts_together_with_its_ends();
    memory_has_a_price();
    reallocation_counts_what_is_lacking();
    std::puts("ok");
}
