// Knapsacks whose gains are nearly proportional to their bytes: a bound that is met, and solutions that meet it.
//
// If turning any operator from one mode to another gains a + price * bytes, with the same a and price for all (a
// latency and the bandwidth: "strongly correlated" items), the linear relaxation says little, since it may take a part
// of an operator and with it a part of a. Take the price off every gain, instead: no choice gains more than
// price * capacity + the best of the knapsack with the gains that remain. Those are multiples of a, so that
// this knapsack is an easy one; and where operators of different sizes can be exchanged for one another, there are so
// many solutions with the same remaining gains that one of them fills the capacity, and meets the bound.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "knapsack.h"

namespace realhf::search::knapsack {

struct Line {
    long double at_zero, slope;
};

// The line that all points (x, y) lie on, to `tolerance`; none if they do not, if x is the same for all, or if the
// line falls or starts below zero.
std::optional<Line> common_line(const std::vector<std::pair<long double, long double>>& points, long double tolerance);

// What remains of gains after the price, in integers: `latency` of them are the line's value at zero.
struct Remainder {
    long double price, unit;
    std::int64_t latency;

    // `line`: of gains in seconds; `largest_s`: of any choice, whose rounding must be far less than a unit.
    Remainder(const Line& line, long double largest_s);

    // Rounded up by less than a unit, after allowing for `margin` of rounding errors.
    std::int64_t of(long double gain_s, std::int64_t bytes) const;

    static constexpr long double margin = 0.05;
};

}  // namespace realhf::search::knapsack
