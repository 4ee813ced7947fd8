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
    const auto slice = [&](auto&& self, int left, std::size_t mode, double s, std::int64_t b, std::int64_t g) -> void {
        if (!left) best = std::min(best, brute_force(problem, min_batch, max_batch, op + 1, s, b, g));
        if (!left || mode == entry.modes.size()) return;
        self(self, left, mode + 1, s, b, g);
        const Mode& m = entry.modes[mode];
        self(self, left - 1, mode, s + m.seconds, b + m.bytes, m.gathers ? std::max(g, entry.gather_bytes) : g);
    };
    slice(slice, entry.slices, 0, seconds, bytes, gather);
    return best;
}

void equals_brute_force() {
    std::mt19937_64 random(7);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    for (int trial = 0; trial < 200; ++trial) {
        Problem problem{{}, 0, draw(0, 30), 0.25};
        const int slices = draw(1, 3), count = draw(1, 5);
        std::int64_t all = 0;
        for (int i = 0; i < count; ++i) {
            const int size = draw(1, 100);
            const double seconds = 0.01 + size * draw(1, 2);
            problem.operators.push_back(
                {slices, size * draw(0, 2), {{2 * seconds, 16 * size, false}, {3 * seconds, 2 * size, true}}});
            if (trial % 2) problem.operators.back().modes.push_back({2.1 * seconds, 9 * size, false});
            all += slices * 16 * size;
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
    Problem problem{{{1, 30, {{1, 80, false}, {2, 10, true}}}, {1, 5, {{1, 40, false}, {1.5, 5, true}}}}, 120, 0, 0};
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

void without_time_the_bound_still_holds() {
    // Gains in proportion to bytes, sizes that share no divisor: the hard case. The limit is passed at once.
    std::mt19937_64 random(3);
    Problem problem{{}, 0, 1 << 24, 1e-3};
    for (int i = 0; i < 60; ++i) {
        const std::int64_t size = std::uniform_int_distribution<std::int64_t>(1'000'000, 100'000'000)(random);
        const double seconds = static_cast<double>(size) * 1e-11;
        problem.operators.push_back({4, size, {{2 * seconds, 16 * size, false}, {3 * seconds, 2 * size, true}}});
        problem.memory_bytes += 4 * 9 * size;
    }
    const Solution solution = solve(problem, 1, 64, 0);
    const double found = solution.step_s / solution.batch;
    CHECK(solution.feasible && solution.lower_bound_s <= found && solution.lower_bound_s > 0.99 * found);
}

void what_cannot_be_is_refused() {
    for (const Problem& problem : {Problem{{{0, 0, {{1, 1, false}}}}, 1, 0, 0}, Problem{{{1, 0, {}}}, 1, 0, 0},
                                   Problem{{{1, 0, {{1, -1, false}}}}, 1, 0, 0}, Problem{{}, 1, -1, 0}}) {
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
    without_time_the_bound_still_holds();
    what_cannot_be_is_refused();
    std::puts("ok");
}
