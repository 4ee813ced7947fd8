#include "common_price.h"

#include <algorithm>
#include <cmath>

namespace realhf::search::knapsack {

namespace {

constexpr long double largest_multiple = 1LL << 36;
constexpr long double smallest_unit = 1e-13;  // of the largest seconds, themselves exact to 10^-16 or so

}  // namespace

std::optional<Line> common_line(const std::vector<std::pair<long double, long double>>& points, long double tolerance) {
    if (points.empty()) return std::nullopt;
    const auto [low, high] = std::minmax_element(points.begin(), points.end());
    if (high->first <= low->first) return std::nullopt;
    Line line{0, (high->second - low->second) / (high->first - low->first)};
    line.at_zero = low->second - line.slope * low->first;
    if (std::abs(line.at_zero) <= tolerance) line = {0, high->second / high->first};
    for (const auto& [x, y] : points) {
        if (std::abs(line.at_zero + line.slope * x - y) > tolerance) return std::nullopt;
    }
    if (line.slope * (high->first - low->first) <= 100 * tolerance || line.at_zero < 0) return std::nullopt;
    return line;
}

Remainder::Remainder(const Line& line, long double largest_s)
    : price(line.slope), unit(largest_s * smallest_unit), latency(0) {
    if (line.at_zero < 2 * unit) return;
    long double multiple = 1;
    while (multiple < largest_multiple && line.at_zero / (2 * multiple) >= unit) multiple *= 2;
    unit = line.at_zero / multiple;
    latency = static_cast<std::int64_t>(multiple);
}

std::int64_t Remainder::of(long double gain_s, std::int64_t bytes) const {
    return static_cast<std::int64_t>(std::ceil((gain_s - price * static_cast<long double>(bytes)) / unit - margin));
}

}  // namespace realhf::search::knapsack
