// Tests of the OSDP knapsacks without Python; built with sanitizers by tests/unit/planning/test_cpp.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>

#include "check.h"
#include "osdp.h"

using namespace realhf::search::osdp;

namespace {

bool near(double a, double b) { return std::abs(a - b) <= 1e-11 * std::abs(b); }

// The least seconds per sample over every division of every operator's slices; infinity if nothing fits.
double brute_force(const Problem& problem, int min_batch, int max_batch, std::size_t op = 0, double seconds = 0,
                   std::int64_t bytes = 0, std::int64_t gather = 0) {
    double best = std::numeric_limits<double>::infinity();
    if (op == problem.operators.size()) {
        for (int batch = min_batch; batch <= max_batch; ++batch) {
            if (bytes + gather + batch * problem.bytes_per_sample > problem.memory_bytes) continue;
            best = std::min(best, problem.seconds_per_sample + seconds / batch);
        }
        return best;
    }
    const Operator& entry = problem.operators[op];
    const auto slice = [&](auto&& self, const Cut& cut, int left, std::size_t mode, double s, std::int64_t b,
                           std::int64_t g) -> void {
        if (!left) best = std::min(best, brute_force(problem, min_batch, max_batch, op + 1, s, b, g));
        if (!left || mode == cut.modes.size()) return;
        self(self, cut, left, mode + 1, s, b, g);
        const Mode& m = cut.modes[mode];
        self(self, cut, left - 1, mode, s + m.seconds, b + m.bytes, m.gathers ? std::max(g, cut.gather_bytes) : g);
    };
    for (const Cut& cut : entry.cuts) slice(slice, cut, cut.slices, 0, seconds, bytes, gather);
    return best;
}

void equals_brute_force() {
    std::mt19937_64 random(7);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    for (int trial = 0; trial < 200; ++trial) {
        Problem problem{{}, 0, draw(0, 30), 0.25};
        const int most = draw(1, 3), count = draw(1, 4);
        std::int64_t all = 0;
        for (int i = 0; i < count; ++i) {
            const int size = 6 * draw(1, 20), gather = draw(0, 2), rate = draw(1, 2);
            problem.operators.emplace_back();
            for (int slices = trial % 3 ? 1 : most; slices <= most; ++slices) {  // each slice has a latency
                const int part = size / slices;
                const double seconds = 0.01 + part * rate;
                Cut cut{slices, part * gather, {{2 * seconds, 16 * part, false}, {3 * seconds, 2 * part, true}}};
                if (trial % 2) cut.modes.push_back({2.1 * seconds, 9 * part, false});
                problem.operators.back().cuts.push_back(cut);
            }
            all += 16 * size;
        }
        problem.memory_bytes = all * draw(1, 12) / 10;
        const int low = draw(1, 2), high = low + draw(0, 8);
        const Solution solution = solve(problem, low, high, 60);
        const double expected = brute_force(problem, low, high);
        CHECK(solution.feasible == std::isfinite(expected));
        CHECK(solution.feasible ||
              solution.smallest_fixed_bytes + low * problem.bytes_per_sample > problem.memory_bytes);
        if (!solution.feasible) continue;
        CHECK(solution.proven && near(solution.step_s / solution.batch, expected));
        CHECK(near(solution.lower_bound_s, expected));
    }
}

void a_gather_counts_once_and_only_where_something_is_sharded() {
    // Sharding the first frees 70 of its 80 bytes for a gather of 30; sharding the second frees 35 for one of 5.
    Problem problem{{{{{1, 30, {{1, 80, false}, {2, 10, true}}}}}, {{{1, 5, {{1, 40, false}, {1.5, 5, true}}}}}}, 120, 0, 0};
    CHECK(near(solve(problem, 1, 1, 60).step_s, 2));
    problem.memory_bytes = 119;  // the second sharded: 80 + 5 + 5
    CHECK(near(solve(problem, 1, 1, 60).step_s, 2.5));
    problem.memory_bytes = 89;  // the first sharded: 10 + 40 + 30
    CHECK(near(solve(problem, 1, 1, 60).step_s, 3));
    problem.memory_bytes = 45;  // both sharded: 10 + 5 + the larger gather
    CHECK(near(solve(problem, 1, 1, 60).step_s, 3.5));
    problem.memory_bytes = 44;
    CHECK(!solve(problem, 1, 1, 60).feasible && solve(problem, 1, 1, 60).smallest_fixed_bytes == 45);
}

void every_operator_has_the_slices_that_suit_it() {
    // Whole, the first needs 8 s and the second 2 s to be sharded, in two slices 9 s and 4 s. In 60 bytes there is room
    // to gather half of the first, which is as large as all of the second.
    const auto cut = [](int slices, int gather, double sharded) {
        return Cut{slices, gather, {{1.0 / slices, 100 / slices, false}, {sharded / slices, 10 / slices, true}}};
    };
    const Problem problem{{{{cut(1, 40, 8), cut(2, 20, 9)}}, {{cut(1, 20, 2), cut(2, 10, 4)}}}, 60, 0, 0};
    const Solution solution = solve(problem, 1, 1, 60);
    CHECK(solution.feasible && solution.proven && near(solution.step_s, 8 + 2));
    Problem tight = problem;
    tight.memory_bytes = 59;
    const Solution sliced = solve(tight, 1, 1, 60);
    CHECK(near(sliced.step_s, 9 + 2) && sliced.cuts == (std::vector<int>{1, 0}));
    tight.memory_bytes = 39;
    CHECK(!solve(tight, 1, 1, 60).feasible && solve(tight, 1, 1, 60).smallest_fixed_bytes == 40);
    // What is in one mode and not gathered stays whole, although slices take no longer.
    tight.memory_bytes = 200;
    CHECK(solve(tight, 1, 1, 60).cuts == (std::vector<int>{0, 0}));
}

void without_time_the_bound_still_holds() {
    // Gains in proportion to bytes, sizes that share no divisor: the hard case. The limit is passed at once.
    std::mt19937_64 random(3);
    Problem problem{{}, 0, 1 << 24, 1e-3};
    for (int i = 0; i < 60; ++i) {
        const std::int64_t size = std::uniform_int_distribution<std::int64_t>(1'000'000, 100'000'000)(random);
        const double seconds = static_cast<double>(size) * 1e-11;
        problem.operators.push_back({{{4, size, {{2 * seconds, 16 * size, false}, {3 * seconds, 2 * size, true}}}}});
        problem.memory_bytes += 4 * 9 * size;
    }
    const Solution solution = solve(problem, 1, 64, 0);
    const double found = solution.step_s / solution.batch;
    CHECK(solution.feasible && solution.lower_bound_s <= found && solution.lower_bound_s > 0.99 * found);
}

void what_cannot_be_is_refused() {
    const Cut good{1, 0, {{1, 1, false}}};
    for (const Problem& problem : {Problem{{{{{0, 0, {{1, 1, false}}}}}}, 1, 0, 0}, Problem{{{{{1, 0, {}}}}}, 1, 0, 0},
                                   Problem{{{{good, {1, 0, {{1, -1, false}}}}}}, 1, 0, 0}, Problem{{{{}}}, 1, 0, 0},
                                   Problem{{}, 1, -1, 0}}) {
        bool refused = false;
        try {
            solve(problem, 1, 1, 1);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
}

}  // namespace

int main() {
    equals_brute_force();
    a_gather_counts_once_and_only_where_something_is_sharded();
    every_operator_has_the_slices_that_suit_it();
    without_time_the_bound_still_holds();
    what_cannot_be_is_refused();
    std::puts("ok");
}
