#include "knapsack.h"

#include <algorithm>
#include <tuple>

namespace realhf::search::knapsack {

namespace {

constexpr std::size_t late_width = 256;  // the lists' past the deadline

}  // namespace

Class class_of(std::vector<Choice> choices) {
    std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
        return std::tie(a.bytes, b.gain, a.origin) < std::tie(b.bytes, a.gain, b.origin);
    });
    Class result;
    for (const Choice& choice : choices) {
        if (result.choices.empty() || choice.gain > result.choices.back().gain) result.choices.push_back(choice);
    }
    const auto below = [&](int a, int b, int c) {  // whether b is strictly under the line from a to c
        const Choice &x = result.choices[a], &y = result.choices[b], &z = result.choices[c];
        return static_cast<long double>(y.gain - x.gain) * static_cast<long double>(z.bytes - y.bytes) <
               static_cast<long double>(z.gain - y.gain) * static_cast<long double>(y.bytes - x.bytes);
    };
    for (int i = 0; i < static_cast<int>(result.choices.size()); ++i) {
        auto& hull = result.hull;
        while (hull.size() >= 2 && below(hull[hull.size() - 2], hull.back(), i)) hull.pop_back();
        hull.push_back(i);
    }
    return result;
}

std::vector<Increment> increments_of(const std::vector<const Class*>& classes) {
    std::vector<Increment> result;
    for (std::size_t i = 0; i < classes.size(); ++i) {
        const auto& [choices, hull] = *classes[i];
        for (std::size_t h = 0; h + 1 < hull.size(); ++h) {
            const Choice &a = choices[hull[h]], &b = choices[hull[h + 1]];
            const std::int64_t bytes = b.bytes - a.bytes, gain = b.gain - a.gain;
            result.push_back({static_cast<int>(i), bytes, gain, static_cast<double>(gain) / static_cast<double>(bytes)});
        }
    }
    std::stable_sort(result.begin(), result.end(),
                     [](const Increment& a, const Increment& b) { return a.slope > b.slope; });
    return result;
}

Knapsack::Knapsack(const std::vector<const Class*>& classes, std::int64_t capacity, Clock::time_point deadline,
                   std::int64_t step)
    : classes_(classes),
      capacity_(capacity),
      deadline_(deadline),
      slack_(static_cast<double>(step) - 0.5),  // sums are exact, and a bound in double is wrong by far less
      start_(classes.size(), 0) {
    relax();
}

// Dantzig's greedy solution and its price; then how near every class is to changing.
void Knapsack::relax() {
    for (const Class* entry : classes_) {
        bytes_ += entry->choices[0].bytes;
        gain_ += entry->choices[0].gain;
    }
    std::vector<int> taken(classes_.size(), 0);
    for (const Increment& step : increments_of(classes_)) {
        if (bytes_ + step.bytes > capacity_) {
            price_ = step.slope;
            break;
        }
        bytes_ += step.bytes;
        gain_ += step.gain;
        ++taken[step.op];
    }
    bound_ = static_cast<double>(gain_) + price_ * static_cast<double>(capacity_ - bytes_);
    std::vector<Entry> growing, shrinking;  // by whether there are more bytes to add or to take
    for (int i = 0; i < static_cast<int>(classes_.size()); ++i) {
        start_[i] = classes_[i]->hull[taken[i]];
        if (classes_[i]->choices.size() < 2) continue;
        const Entry entry = entry_of(i, taken[i]);
        order_.push_back(entry);
        const auto& choices = classes_[i]->choices;
        const bool grows = choices[start_[i]].bytes - choices[0].bytes <= choices.back().bytes - choices[start_[i]].bytes;
        (grows ? growing : shrinking).push_back(entry);
    }
    // In turns, so that sums of the first few reach to both sides of the capacity.
    const auto loses_less = [](const Entry& a, const Entry& b) { return a.loss < b.loss; };
    for (auto* list : {&growing, &shrinking}) std::stable_sort(list->begin(), list->end(), loses_less);
    for (std::size_t k = 0; k < std::max(growing.size(), shrinking.size()); ++k) {
        for (const auto* list : {&growing, &shrinking}) {
            if (k < list->size()) in_turns_.push_back((*list)[k]);
        }
    }
    const auto distance = [&](const Entry& entry) { return std::min(price_ - entry.low, entry.high - price_); };
    std::stable_sort(order_.begin(), order_.end(),
                     [&](const Entry& a, const Entry& b) { return distance(a) < distance(b); });
    low_.assign(order_.size() + 1, 0);
    high_.assign(order_.size() + 1, infinity);
    double loss = infinity;
    for (std::size_t k = order_.size(); k-- > 0;) {
        low_[k] = std::max(low_[k + 1], order_[k].low);
        high_[k] = std::min(high_[k + 1], order_[k].high);
        loss = in_turns_[k].loss_from_here = std::min(loss, in_turns_[k].loss);
    }
}

Knapsack::Entry Knapsack::entry_of(int op, int taken) const {
    const auto& [choices, hull] = *classes_[op];
    const Choice& from = choices[hull[taken]];
    const auto slope = [](const Choice& a, const Choice& b) {
        return static_cast<double>(b.gain - a.gain) / static_cast<double>(b.bytes - a.bytes);
    };
    const double low = taken + 1 < static_cast<int>(hull.size()) ? slope(from, choices[hull[taken + 1]]) : 0;
    const double high = taken > 0 ? slope(choices[hull[taken - 1]], from) : infinity;
    double least = infinity;
    for (const Choice& to : choices) {
        if (&to == &from) continue;
        least = std::min(
            least, price_ * static_cast<double>(to.bytes - from.bytes) - static_cast<double>(to.gain - from.gain));
    }
    return {op, low, high, least, least};
}

void Knapsack::begin(std::int64_t gain) {
    best_gain_ = gain;
    missed_ = -infinity;
    changes_.clear();
    found_ = false;
    if (bytes_ <= capacity_ && gain_ > best_gain_) take(gain_, -1, -1);
}

bool Knapsack::meet(std::int64_t gain, std::size_t width, std::size_t distance) {
    begin(gain);
    std::vector<Sum> halves[2] = {{{0, 0, -1}}, {{0, 0, -1}}};
    for (std::size_t k = 0; k < in_turns_.size(); ++k) {
        const double reach = bound_ - in_turns_[k].loss_from_here;
        if (reach < static_cast<double>(best_gain_) + slack_) break;
        std::vector<Sum>& half = halves[halves[0].size() > halves[1].size()];
        const bool is_late = half.size() > late_width && Clock::now() > deadline_;
        if (k % distance || half.size() > width || is_late) {
            missed_ = std::max(missed_, reach);
            if (k % distance) continue;
            break;
        }
        add(in_turns_[k].op, half, [&](const Sum& sum) { return may_improve(sum.bytes, sum.gain); });
    }
    std::size_t j = halves[1].size();
    const Sum* best[2] = {nullptr, nullptr};
    for (const Sum& a : halves[0]) {
        while (j > 0 && bytes_ + a.bytes + halves[1][j - 1].bytes > capacity_) --j;
        if (j == 0) break;
        const Sum& b = halves[1][j - 1];
        if (gain_ + a.gain + b.gain <= best_gain_) continue;
        best_gain_ = gain_ + a.gain + b.gain;
        best[0] = &a;
        best[1] = &b;
    }
    if (best[0]) take(best_gain_, best[0]->node, best[1]->node);
    return found_;
}

bool Knapsack::sweep(std::int64_t gain, std::size_t width) {
    begin(gain);
    std::vector<Sum> sums{{0, 0, -1}};
    for (std::size_t k = 0; k < order_.size() && !sums.empty(); ++k) {
        const std::size_t most = Clock::now() > deadline_ ? std::min(width, late_width) : width;
        if (sums.size() > most) shrink(sums, k, most);
        add(order_[k].op, sums, [&](const Sum& sum) {
            return bound(sum, k + 1) >= static_cast<double>(best_gain_) + slack_;
        });
        const Sum* best = nullptr;
        for (const Sum& sum : sums) {
            if (bytes_ + sum.bytes > capacity_) break;
            if (gain_ + sum.gain > best_gain_) best = &sum;  // gains grow with bytes
        }
        if (best) take(gain_ + best->gain, best->node, -1);
    }
    return found_;
}

bool Knapsack::may_improve(std::int64_t bytes, std::int64_t gain) const {
    return bound_ + static_cast<double>(gain) - price_ * static_cast<double>(bytes) >=
           static_cast<double>(best_gain_) + slack_;
}

double Knapsack::bound(const Sum& sum, std::size_t k) const {
    const double left = static_cast<double>(capacity_ - bytes_ - sum.bytes);
    return static_cast<double>(gain_ + sum.gain) + left * (left >= 0 ? low_[k] : high_[k]);
}

void Knapsack::shrink(std::vector<Sum>& sums, std::size_t k, std::size_t width) {
    const auto better = [&](const Sum& a, const Sum& b) {
        return std::make_tuple(-bound(a, k), a.bytes) < std::make_tuple(-bound(b, k), b.bytes);
    };
    std::nth_element(sums.begin(), sums.begin() + width, sums.end(), better);
    for (auto sum = sums.begin() + width; sum != sums.end(); ++sum) missed_ = std::max(missed_, bound(*sum, k));
    sums.resize(width);
    std::sort(sums.begin(), sums.end(), [](const Sum& a, const Sum& b) { return a.bytes < b.bytes; });
}

// Every choice of a class with every sum of the others before it; of all that may be kept, what nothing of no more
// bytes matches.
template <typename Keep>
void Knapsack::add(int op, std::vector<Sum>& sums, const Keep& may_be_kept) {
    const auto& choices = classes_[op]->choices;
    const Choice& start = choices[start_[op]];
    const std::vector<Sum> before = sums;
    sums.erase(std::remove_if(sums.begin(), sums.end(), [&](const Sum& sum) { return !may_be_kept(sum); }), sums.end());
    for (int c = 0; c < static_cast<int>(choices.size()); ++c) {
        const std::int64_t bytes = choices[c].bytes - start.bytes, gain = choices[c].gain - start.gain;
        if (c == start_[op] || !may_improve(bytes, gain)) continue;
        shifted_.clear();
        for (const Sum& sum : before) {
            const Sum moved{sum.bytes + bytes, sum.gain + gain, static_cast<int>(changes_.size())};
            if (!may_be_kept(moved)) continue;
            shifted_.push_back(moved);
            changes_.push_back({sum.node, op, c});
        }
        states_ += static_cast<std::int64_t>(before.size());
        merged_.clear();
        const auto is_first = [](const Sum& a, const Sum& b) {
            return a.bytes < b.bytes || (a.bytes == b.bytes && a.gain >= b.gain);
        };
        std::size_t i = 0, j = 0;
        while (i < sums.size() || j < shifted_.size()) {
            const bool left = j == shifted_.size() || (i < sums.size() && is_first(sums[i], shifted_[j]));
            const Sum& next = left ? sums[i++] : shifted_[j++];
            if (merged_.empty() || next.gain > merged_.back().gain) merged_.push_back(next);
        }
        sums.swap(merged_);
    }
}

// The greedy solution with the changes of one or two sums.
void Knapsack::take(std::int64_t gain, int first, int second) {
    best_gain_ = gain;
    best_ = start_;
    for (int node : {first, second}) {
        for (; node >= 0; node = changes_[node].parent) best_[changes_[node].op] = changes_[node].choice;
    }
    found_ = true;
}

}  // namespace realhf::search::knapsack
