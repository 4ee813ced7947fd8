#include "osdp.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "knapsack.h"

namespace realhf::search::osdp {

namespace {

using namespace knapsack;

// Seconds become integers of at most 2^46 in sum: sums are exact, and a bound in double is wrong by far less than 1/2.
constexpr double largest_sum = 70368744177664.0;
// Sums in a list, and the distance of the classes that meet (0: a sweep). Narrow passes find good solutions, which wider
// ones need to leave sums out; distant classes differ more in their bytes, so that their sums reach further.
struct Pass {
    std::size_t width, distance;
};
constexpr Pass passes[] = {{256, 0},     {1 << 10, 1}, {1 << 12, 2}, {1 << 10, 0}, {1 << 14, 1}, {1 << 14, 3},
                           {1 << 16, 1}, {1 << 16, 2}, {1 << 16, 0}, {1 << 18, 1}, {1 << 18, 3}, {1 << 20, 0},
                           {1 << 20, 1}};
constexpr std::size_t bound_width = 1 << 12;
constexpr double relative_tolerance = 1e-12;
constexpr long double line_tolerance = 4e-15;  // times the largest seconds: rounding of doubles
constexpr long double largest_multiple = 1LL << 36;
constexpr long double smallest_unit = 1e-13;  // times the largest seconds, themselves exact to 10^-16 or so
constexpr std::int64_t no_gain = -(std::int64_t{1} << 60);

// Knapsacks whose gains are nearly proportional to their bytes: a bound that is met, and solutions that meet it.
//
// If turning any operator from one mode to another gains a + price * bytes, with the same a and price for all (a
// latency and the bandwidth: "strongly correlated" items), the linear relaxation says little, since it may take a part
// of an operator and with it a part of a. Take the price off every gain, instead: no choice gains more than
// price * capacity + the best of the knapsack with the gains that remain. Those are multiples of a, so that
// this knapsack is an easy one; and where operators of different sizes can be exchanged for one another, there are so
// many solutions with the same remaining gains that one of them fills the capacity, and meets the bound.
struct Line {
    long double at_zero, slope;
};

// The line that all points (x, y) lie on, to `tolerance`; none if they do not, if x is the same for all, or if the
// line falls or starts below zero.
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

// What remains of gains in seconds after the price of their line, in whole numbers of a unit. The line's value at zero
// is a multiple of it.
struct Remainder {
    long double price, unit;

    // `largest_s`: of any choice, whose rounding must be far less than a unit.
    Remainder(const Line& line, long double largest_s) : price(line.slope), unit(largest_s * smallest_unit) {
        if (line.at_zero < 2 * unit) return;
        long double multiple = 1;
        while (multiple < largest_multiple && line.at_zero / (2 * multiple) >= unit) multiple *= 2;
        unit = line.at_zero / multiple;
    }

    // Rounded up by less than a unit, after allowing for `margin` of rounding errors.
    std::int64_t of(long double gain_s, std::int64_t bytes) const {
        return static_cast<std::int64_t>(std::ceil((gain_s - price * static_cast<long double>(bytes)) / unit - margin));
    }

    static constexpr long double margin = 0.05;
};

constexpr std::int64_t no_gather = -1;  // less than the bytes of any

// One way to cut an operator, and to divide the slices over its modes.
struct Division {
    int cut;
    std::vector<int> slices;  // [mode]
    std::int64_t bytes;
    long double seconds;
    std::int64_t gather_bytes;
};

void append_divisions(const Operator& op, int number, std::vector<int>& slices, std::size_t mode, int left,
                      std::vector<Division>& divisions) {
    const Cut& cut = op.cuts[number];
    if (mode == cut.modes.size()) {
        if (left) return;
        Division division{number, slices, 0, 0, no_gather};
        for (std::size_t m = 0; m < slices.size(); ++m) {
            division.bytes += slices[m] * cut.modes[m].bytes;
            division.seconds += slices[m] * static_cast<long double>(cut.modes[m].seconds);
            if (slices[m] && cut.modes[m].gathers) division.gather_bytes = cut.gather_bytes;
        }
        const bool is_one = *std::max_element(slices.begin(), slices.end()) == cut.slices;
        if (number == 0 || !is_one || division.gather_bytes != no_gather) divisions.push_back(std::move(division));
        return;
    }
    for (int count = 0; count <= left; ++count) {
        slices[mode] = count;
        append_divisions(op, number, slices, mode + 1, left - count, divisions);
    }
    slices[mode] = 0;
}

// Operators that are equal share their divisions, and the classes made of them: with no gather, and with those of up to
// each of `gathers`.
struct Kind {
    std::vector<Division> divisions;
    std::vector<std::int64_t> gathers;
    std::vector<Class> classes;
};

// A kind with a price taken off its gains: what remains for each division, over that of the first.
struct PricedKind {
    std::vector<std::int64_t> remainder;
    std::vector<Class> classes;
};

struct Pricing {
    Remainder remainder;
    std::vector<PricedKind> kinds;
    std::int64_t step = 0;  // all that remains are multiples of it
};

template <typename Gain>
std::vector<Class> classes_of(const Kind& kind, const Gain& gain) {
    std::vector<Class> result;
    for (std::size_t allowed = 0; allowed <= kind.gathers.size(); ++allowed) {
        const std::int64_t most = allowed ? kind.gathers[allowed - 1] : no_gather;
        std::vector<Choice> choices;
        for (int d = 0; d < static_cast<int>(kind.divisions.size()); ++d) {
            const Division& division = kind.divisions[d];
            if (division.gather_bytes <= most) choices.push_back({division.bytes, gain(d), d});
        }
        result.push_back(class_of(std::move(choices)));
    }
    return result;
}

void sort_unique(std::vector<std::int64_t>& numbers) {
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
}

// Sums of these fit into 64 bits, and there are not too many divisions.
constexpr int most_samples = 1 << 16;
constexpr std::size_t most_modes = 4;
constexpr std::int64_t most_bytes = std::int64_t{1} << 60;  // of each term of a sum, and of the sum
constexpr double most_seconds = 1e12;

bool is_bytes(std::int64_t bytes) { return 0 <= bytes && bytes <= most_bytes; }
bool is_seconds(double seconds) { return 0 <= seconds && seconds <= most_seconds; }  // false for NaN

void check(const Problem& problem, int min_batch, int max_batch) {
    if (min_batch < 1 || max_batch < min_batch || max_batch > most_samples) {
        throw std::invalid_argument("osdp: batches must be from 1 to " + std::to_string(most_samples));
    }
    if (!is_bytes(problem.bytes_per_sample) || problem.bytes_per_sample > most_bytes / max_batch ||
        !is_seconds(problem.seconds_per_sample) || std::abs(problem.memory_bytes) > most_bytes) {
        throw std::invalid_argument("osdp: bytes and seconds must not be negative or too large");
    }
    double all_bytes = 0;
    for (std::size_t i = 0; i < problem.operators.size(); ++i) {
        const Operator& op = problem.operators[i];
        bool valid = !op.cuts.empty();
        double most = 0;
        for (const Cut& cut : op.cuts) {
            valid = valid && cut.slices >= 1 && cut.slices <= most_slices && is_bytes(cut.gather_bytes) &&
                    !cut.modes.empty() && cut.modes.size() <= most_modes;
            for (const Mode& mode : cut.modes) {
                valid = valid && is_bytes(mode.bytes) && is_seconds(mode.seconds);
                most = std::max(most, static_cast<double>(cut.slices) * static_cast<double>(mode.bytes));
            }
        }
        all_bytes += most;
        if (!valid) throw std::invalid_argument("osdp: operator " + std::to_string(i) + " is not valid");
    }
    if (all_bytes > static_cast<double>(most_bytes)) throw std::invalid_argument("osdp: operators have too many bytes");
}

double scale_of(const Problem& problem) {
    double total = 0;
    for (const Operator& op : problem.operators) {
        double most = 0;
        for (const Cut& cut : op.cuts) {
            for (const Mode& mode : cut.modes) most = std::max(most, cut.slices * mode.seconds);
        }
        total += most;
    }
    return total > 0 ? largest_sum / total : 1;
}

// All knapsacks: one for each batch and each largest gather that the choice may contain.
class Family {
  public:
    Family(const Problem& problem, int min_batch, int max_batch)
        : problem_(problem), min_batch_(min_batch), max_batch_(max_batch), scale_(scale_of(problem)) {
        std::map<std::vector<double>, int> known;
        for (const Operator& op : problem.operators) {
            std::vector<double> key;
            for (const Cut& cut : op.cuts) {
                key.insert(key.end(), {static_cast<double>(cut.slices), static_cast<double>(cut.gather_bytes),
                                       static_cast<double>(cut.modes.size())});
                for (const Mode& mode : cut.modes) {
                    key.insert(key.end(), {mode.seconds, static_cast<double>(mode.bytes), mode.gathers ? 1.0 : 0.0});
                }
            }
            const auto [entry, is_new] = known.emplace(std::move(key), static_cast<int>(kinds_.size()));
            if (is_new) add_kind(op);
            kind_.push_back(entry->second);
        }
        gathers_.push_back(no_gather);
        for (const Kind& kind : kinds_) gathers_.insert(gathers_.end(), kind.gathers.begin(), kind.gathers.end());
        sort_unique(gathers_);
        add_pricings();
    }

    Solution solve(double time_limit_s) {
        const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                 std::chrono::duration<double>(std::min(time_limit_s, 1e6)));
        relax();
        double missed = infinity;
        const auto later = [](const Node& a, const Node& b) {
            return std::tie(a.bound, b.batch, a.gather) > std::tie(b.bound, a.batch, b.gather);
        };
        std::make_heap(nodes_.begin(), nodes_.end(), later);
        while (!nodes_.empty() && is_open(nodes_.front().bound)) {
            if (result_.feasible && Clock::now() > deadline) break;
            Node node = nodes_.front();
            std::pop_heap(nodes_.begin(), nodes_.end(), later);
            nodes_.pop_back();
            if (!node.is_priced && !pricings_.empty()) {  // the heap tells whether it is still the next one
                price(node, deadline);
                nodes_.push_back(node);
                std::push_heap(nodes_.begin(), nodes_.end(), later);
                continue;
            }
            missed = std::min(missed, solve_node(node, deadline));
        }
        const double open = nodes_.empty() ? infinity : nodes_.front().bound;
        result_.lower_bound_s = std::min({best_, open, missed});
        result_.proven = result_.feasible && result_.lower_bound_s >= best_ * (1 - 2 * relative_tolerance);
        if (result_.proven) result_.lower_bound_s = result_.step_s / result_.batch;
        return result_;
    }

  private:
    struct Node {
        double bound;  // on the seconds per sample
        int batch, gather;
        bool is_priced = false;
    };

    void add_kind(const Operator& op) {
        Kind kind;
        for (int cut = 0; cut < static_cast<int>(op.cuts.size()); ++cut) {
            std::vector<int> slices(op.cuts[cut].modes.size(), 0);
            append_divisions(op, cut, slices, 0, op.cuts[cut].slices, kind.divisions);
        }
        for (const Division& division : kind.divisions) {
            if (division.gather_bytes != no_gather) kind.gathers.push_back(division.gather_bytes);
        }
        sort_unique(kind.gathers);
        const auto gain = [&](int d) { return -std::llroundl(kind.divisions[d].seconds * scale_); };
        kind.classes = classes_of(kind, gain);
        kinds_.push_back(std::move(kind));
    }

    // For each line that all operators' exchanges of one mode for another lie on.
    void add_pricings() {
        long double largest_s = 0;
        for (const Kind& kind : kinds_) {
            for (const Division& division : kind.divisions) largest_s = std::max(largest_s, division.seconds);
        }
        const std::size_t modes = problem_.operators.empty() ? 0 : problem_.operators[0].cuts[0].modes.size();
        for (std::size_t small = 0; small < modes; ++small) {
            for (std::size_t large = 0; large < modes; ++large) {
                if (is_useless(small) || is_useless(large)) continue;
                std::vector<std::pair<long double, long double>> points;
                for (const Operator& op : problem_.operators) {
                    for (const Cut& cut : op.cuts) {
                        if (cut.modes.size() != modes) return;
                        const Mode &from = cut.modes[small], &to = cut.modes[large];
                        points.emplace_back(to.bytes - from.bytes, static_cast<long double>(from.seconds) - to.seconds);
                    }
                }
                const auto line = common_line(points, largest_s * line_tolerance);
                if (line && points[0].first > 0) add_pricing({*line, largest_s});
            }
        }
    }

    // Whether for every operator another mode is neither slower nor larger, and needs no gather.
    bool is_useless(std::size_t mode) const {
        const auto& operators = problem_.operators;
        for (std::size_t other = 0; other < operators[0].cuts[0].modes.size(); ++other) {
            const auto beats = [&](const Cut& cut) {
                if (std::max(other, mode) >= cut.modes.size()) return false;
                const Mode &a = cut.modes[other], &b = cut.modes[mode];
                return a.seconds <= b.seconds && a.bytes <= b.bytes && !a.gathers &&
                       (a.seconds < b.seconds || a.bytes < b.bytes || other < mode);
            };
            const auto always_beats = [&](const Operator& op) {
                return std::all_of(op.cuts.begin(), op.cuts.end(), beats);
            };
            if (other != mode && std::all_of(operators.begin(), operators.end(), always_beats)) return true;
        }
        return false;
    }

    void add_pricing(const Remainder& remainder) {
        Pricing pricing{remainder, {}, 0};
        for (const Kind& kind : kinds_) {
            PricedKind priced;
            const Division& first = kind.divisions[0];
            for (const Division& division : kind.divisions) {
                priced.remainder.push_back(
                    remainder.of(first.seconds - division.seconds, division.bytes - first.bytes));
                pricing.step = std::gcd(pricing.step, priced.remainder.back() - priced.remainder[0]);
            }
            const auto gain = [&](int d) { return priced.remainder[d]; };
            priced.classes = classes_of(kind, gain);
            pricing.kinds.push_back(std::move(priced));
        }
        pricing.step = std::max<std::int64_t>(pricing.step, 1);
        pricings_.push_back(std::move(pricing));
    }

    // How many of the gathers of an operator's kind are no larger than one of all.
    std::size_t allowed(int op, int gather) const {
        const auto& own = kinds_[kind_[op]].gathers;
        return std::upper_bound(own.begin(), own.end(), gathers_[gather]) - own.begin();
    }

    template <typename Kinds>
    std::vector<const Class*> classes(const Kinds& kinds, int gather) const {
        std::vector<const Class*> result;
        for (int i = 0; i < static_cast<int>(kind_.size()); ++i) {
            result.push_back(&kinds[kind_[i]].classes[allowed(i, gather)]);
        }
        return result;
    }

    std::int64_t capacity(int batch, int gather) const {
        return problem_.memory_bytes - batch * problem_.bytes_per_sample - std::max<std::int64_t>(gathers_[gather], 0);
    }

    // The capacity without what no choice can fill, because all of them differ by multiples of some number of bytes.
    std::int64_t usable_capacity(const Node& node, const std::vector<const Class*>& options) const {
        std::int64_t least = 0, divisor = 0;
        for (const Class* entry : options) {
            least += entry->choices[0].bytes;
            for (const Choice& choice : entry->choices) {
                divisor = std::gcd(divisor, choice.bytes - entry->choices[0].bytes);
            }
        }
        const std::int64_t limit = capacity(node.batch, node.gather);
        return divisor ? least + (limit - least) / divisor * divisor : least;
    }

    double seconds_per_sample(int batch, long double gain_s) const {
        return static_cast<double>(problem_.seconds_per_sample - gain_s / batch);
    }

    double seconds_of(int batch, double gain) const { return seconds_per_sample(batch, gain / scale_); }

    bool is_open(double bound) const { return bound < best_ * (1 - relative_tolerance); }

    // Linear relaxations (Dantzig) of all knapsacks, in one sweep for each largest gather.
    void relax() {
        result_.smallest_fixed_bytes = std::numeric_limits<std::int64_t>::max();
        std::vector<std::pair<Increment, std::size_t>> steps;  // all classes, by how many gathers are allowed
        std::size_t most = 0;
        for (const Kind& kind : kinds_) most = std::max(most, kind.gathers.size());
        for (std::size_t number = 0; number <= most; ++number) {
            std::vector<const Class*> all;
            for (const int kind : kind_) {
                all.push_back(&kinds_[kind].classes[std::min(number, kinds_[kind].gathers.size())]);
            }
            for (const Increment& step : increments_of(all)) {
                if (number <= kinds_[kind_[step.op]].gathers.size()) steps.emplace_back(step, number);
            }
        }
        std::stable_sort(steps.begin(), steps.end(),
                         [](const auto& a, const auto& b) { return a.first.slope > b.first.slope; });
        for (int gather = 0; gather < static_cast<int>(gathers_.size()); ++gather) {
            const auto options = classes(kinds_, gather);
            std::vector<std::size_t> allowed_now;
            for (std::size_t op = 0; op < kind_.size(); ++op) allowed_now.push_back(allowed(static_cast<int>(op), gather));
            std::int64_t bytes = 0, gain = 0;
            const auto is_empty = [](const Class* entry) { return entry->choices.empty(); };
            if (std::any_of(options.begin(), options.end(), is_empty)) continue;  // every mode gathers
            for (const Class* entry : options) {
                bytes += entry->choices[0].bytes;
                gain += entry->choices[0].gain;
            }
            result_.smallest_fixed_bytes =
                std::min(result_.smallest_fixed_bytes, bytes + std::max<std::int64_t>(gathers_[gather], 0));
            if (bytes > capacity(min_batch_, gather)) continue;
            auto next = steps.begin();
            for (int batch = max_batch_; batch >= min_batch_; --batch) {
                const std::int64_t limit = capacity(batch, gather);
                if (bytes > limit) continue;
                for (; next != steps.end(); ++next) {
                    if (next->second != allowed_now[next->first.op]) continue;
                    if (bytes + next->first.bytes > limit) break;
                    bytes += next->first.bytes;
                    gain += next->first.gain;
                }
                const double rest = next == steps.end() ? 0 : next->first.slope * static_cast<double>(limit - bytes);
                nodes_.push_back({seconds_of(batch, static_cast<double>(gain) + rest), batch, gather});
            }
        }
    }

    // Raises the bound to the best that a common price proves.
    void price(Node& node, Clock::time_point deadline) {
        node.is_priced = true;
        const std::int64_t limit = usable_capacity(node, classes(kinds_, node.gather));
        for (const Pricing& pricing : pricings_) {
            const auto options = classes(pricing.kinds, node.gather);
            Knapsack knapsack(options, limit, deadline, pricing.step);
            knapsack.meet(no_gain, bound_width);
            result_.states += knapsack.states();
            const long double most = std::max(static_cast<double>(knapsack.best_gain()), knapsack.missed());
            const Remainder& remainder = pricing.remainder;
            long double gain_s = remainder.price * limit;
            for (const int kind : kind_) {
                const Division& first = kinds_[kind].divisions[0];
                gain_s -= first.seconds + remainder.price * first.bytes;
            }
            gain_s += remainder.unit * (most + Remainder::margin * static_cast<long double>(kind_.size()));
            node.bound = std::max(node.bound, seconds_per_sample(node.batch, gain_s));
        }
    }

    // Updates the best solution; returns a bound on what was not looked at.
    double solve_node(const Node& node, Clock::time_point deadline) {
        const auto options = classes(kinds_, node.gather);
        Knapsack knapsack(options, usable_capacity(node, options), deadline);
        std::int64_t gain = no_gain;
        if (best_ < infinity) {
            gain = static_cast<std::int64_t>(
                std::floor((problem_.seconds_per_sample - best_ * (1 - relative_tolerance)) * node.batch * scale_));
        }
        double missed = infinity;  // the smallest bound of any pass
        for (const auto& [width, distance] : passes) {
            if (distance ? knapsack.meet(gain, width, distance) : knapsack.sweep(gain, width)) {
                gain = knapsack.best_gain();
                take(node, options, knapsack.best(), gain);
            }
            missed = std::min(missed, std::max(knapsack.missed(), static_cast<double>(gain)));
            if (missed < static_cast<double>(gain) + 0.5 || !is_open(node.bound) || Clock::now() > deadline) break;
        }
        result_.states += knapsack.states();
        if (missed < static_cast<double>(gain) + 0.5) return infinity;
        return std::max(node.bound, seconds_of(node.batch, missed));
    }

    void take(const Node& node, const std::vector<const Class*>& options, const std::vector<int>& chosen,
              std::int64_t gain) {
        best_ = seconds_of(node.batch, static_cast<double>(gain));
        result_.feasible = true;
        result_.batch = node.batch;
        result_.cuts.clear();
        result_.slices.clear();
        result_.step_s = node.batch * problem_.seconds_per_sample;
        for (std::size_t i = 0; i < chosen.size(); ++i) {
            const Division& division = kinds_[kind_[i]].divisions[options[i]->choices[chosen[i]].origin];
            const Cut& cut = problem_.operators[i].cuts[division.cut];
            result_.cuts.push_back(division.cut);
            result_.slices.push_back(division.slices);
            for (std::size_t m = 0; m < division.slices.size(); ++m) {
                result_.step_s += division.slices[m] * cut.modes[m].seconds;
            }
        }
    }

    const Problem& problem_;
    int min_batch_, max_batch_;
    double scale_, best_ = infinity;
    std::vector<Kind> kinds_;
    std::vector<int> kind_;  // [operator]
    std::vector<std::int64_t> gathers_;
    std::vector<Pricing> pricings_;
    std::vector<Node> nodes_;
    Solution result_;
};

}  // namespace

Solution solve(const Problem& problem, int min_batch, int max_batch, double time_limit_s) {
    check(problem, min_batch, max_batch);
    if (!is_seconds(time_limit_s)) throw std::invalid_argument("osdp: the time limit must not be negative");
    return Family(problem, min_batch, max_batch).solve(time_limit_s);
}

}  // namespace realhf::search::osdp
