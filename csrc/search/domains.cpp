// What a branch and bound still has to choose from.
#include "domains.h"

#include <algorithm>
#include <map>

namespace realhf::search {
namespace {

void widen(Outlook& outlook, const Outlook& other) {
    outlook.time = std::min(outlook.time, other.time);
    outlook.area = std::min(outlook.area, other.area);
    outlook.static_bytes = std::min(outlook.static_bytes, other.static_bytes);
    outlook.dynamic_bytes = std::min(outlook.dynamic_bytes, other.dynamic_bytes);
    outlook.communicator_bytes = std::min(outlook.communicator_bytes, other.communicator_bytes);
    outlook.size = std::min(outlook.size, other.size);
    outlook.last_begin = std::max(outlook.last_begin, other.last_begin);
    outlook.first_end = std::min(outlook.first_end, other.first_end);
}

std::size_t count(const std::vector<std::vector<int>>& groups) {
    std::size_t total = 0;
    for (const std::vector<int>& options : groups) total += options.size();
    return total;
}

constexpr std::size_t kMaxTable = 100'000'000;  // entries; beyond, transfers between unsettled options count nothing

}  // namespace

Groups::Groups(const Problem& problem) : problem_(problem), groups_(problem.calls.size()) {
    for (std::size_t c = 0; c < problem.calls.size(); ++c) {
        const std::vector<Option>& options = problem.calls[c].options;
        std::map<std::pair<int, int>, Group> by_mesh;
        for (int i = 0; i < static_cast<int>(options.size()); ++i) {
            const Outlook outlook = outlook_of(static_cast<int>(c), i);
            const auto [at, is_new] = by_mesh.try_emplace({options[i].first, options[i].size}, Group{{}, outlook});
            at->second.options.push_back(i);
            widen(at->second.outlook, outlook);
        }
        for (auto& [mesh, group] : by_mesh) {
            std::stable_sort(group.options.begin(), group.options.end(),
                             [&](int a, int b) { return options[a].time < options[b].time; });
            groups_[c].push_back(std::move(group));
        }
    }
    for (const Transfer& transfer : problem.transfers) {
        moved_.push_back({moved_of(transfer, transfer.source, transfer.rows),
                          moved_of(transfer, transfer.target, transfer.columns)});
        const auto& [sources, targets] = moved_.back();
        const bool too_many = count(sources) * count(targets) > kMaxTable;
        std::vector<double> between;
        for (const std::vector<int>& source : sources) {
            for (const std::vector<int>& target : targets) between.push_back(too_many ? 0 : least(transfer, source, target));
        }
        between_groups_.push_back(std::move(between));
    }
    for (int size = 1; 2 * size <= problem.num_devices; size *= 2) {
        for (int begin = 0; begin + 2 * size <= problem.num_devices; begin += 2 * size) {
            if (changes_nothing({begin, size})) exchanges_.push_back({begin, size});
        }
    }
}

Outlook Groups::outlook_of(int call, int number) const {
    const Option& option = problem_.calls[call].options[number];
    const double communicator_bytes = problem_.communicator_bytes * problem_.num_communicators(option);
    // What a call keeps where it is at home, it needs while it runs where it is not: at least that is certain.
    const bool stays = problem_.calls[call].home == call;
    const double statics = stays ? option.static_bytes : 0;
    const double dynamic = stays ? option.dynamic_bytes : option.static_bytes + option.dynamic_bytes;
    return {option.time,        option.time * option.size, statics,      dynamic,
            communicator_bytes, option.size,               option.first, option.first + option.size};
}

Outlook Groups::outlook(int call, const Choice& choice) const {
    if (choice.option >= 0) return outlook_of(call, choice.option);
    return groups_[call][choice.group].outlook;
}

Outlook Groups::outlook(int call, const Domain& domain) const {
    Outlook result = outlook(call, domain.choices.front());
    for (const Choice& choice : domain.choices) widen(result, outlook(call, choice));
    return result;
}

Domain Groups::all(int call) const {
    Domain domain;
    for (int g = 0; g < static_cast<int>(groups_[call].size()); ++g) domain.choices.push_back({g, -1});
    return domain;
}

Domain Groups::opened(int call, int group) const {
    Domain domain;
    for (int option : groups_[call][group].options) domain.choices.push_back({group, option});
    domain.is_placed = true;
    return domain;
}

double Groups::least_transfer(int transfer, const Choice& source, const Choice& target) const {
    const Transfer& t = problem_.transfers[transfer];
    if (source.option >= 0 && target.option >= 0) return problem_.transfer_time(t, source.option, target.option);
    const double between = between_groups_[transfer][source.group * groups_[t.target].size() + target.group];
    const auto& [sources, targets] = moved_[transfer];
    if (source.option >= 0) return std::max(between, least(t, {source.option}, targets[target.group]));
    if (target.option >= 0) return std::max(between, least(t, sources[source.group], {target.option}));
    return between;
}

double Groups::least(const Transfer& transfer, const std::vector<int>& sources, const std::vector<int>& targets) const {
    double time = std::numeric_limits<double>::infinity();
    for (int source : sources) {
        for (int target : targets) time = std::min(time, problem_.transfer_time(transfer, source, target));
        if (time == 0) break;
    }
    return time;
}

// `rows` (or columns) [options of the call] are what the transfer tells apart, beside the layouts where it asks for them.
std::vector<std::vector<int>> Groups::moved_of(const Transfer& transfer, int call, const std::vector<int>& rows) const {
    std::vector<std::vector<int>> result;
    for (const Group& group : groups_[call]) {
        std::vector<std::pair<int, int>> seen;
        std::vector<int> moved;
        for (int option : group.options) {
            const std::pair key{rows[option],
                                transfer.free_if_unmoved ? problem_.calls[call].options[option].strategy : 0};
            if (std::find(seen.begin(), seen.end(), key) != seen.end()) continue;
            seen.push_back(key);
            moved.push_back(option);
        }
        result.push_back(std::move(moved));
    }
    return result;
}

// Everything that an option's costs depend on, but for its place.
std::vector<double> Groups::signature(int call, int option) const {
    const Option& o = problem_.calls[call].options[option];
    std::vector<double> result = {static_cast<double>(o.strategy), o.time, o.static_bytes, o.dynamic_bytes,
                                  o.copy_bytes, static_cast<double>(o.communicators)};
    for (const Transfer& transfer : problem_.transfers) {
        if (transfer.source == call) result.push_back(transfer.rows[option]);
        if (transfer.target == call) result.push_back(transfer.columns[option]);
    }
    return result;
}

bool Groups::changes_nothing(const Exchange& exchange) const {
    const int begin = exchange.begin, middle = begin + exchange.size, end = middle + exchange.size;
    for (int call = 0; call < static_cast<int>(groups_.size()); ++call) {
        const auto signatures = [&](int first, int size) {
            std::vector<std::vector<double>> result;
            for (const Group& group : groups_[call]) {
                const Outlook& mesh = group.outlook;
                if (mesh.last_begin != first || mesh.size != size) continue;
                for (int option : group.options) result.push_back(signature(call, option));
            }
            std::sort(result.begin(), result.end());
            return result;
        };
        for (const Group& group : groups_[call]) {
            const int first = group.outlook.last_begin, size = group.outlook.size;
            if (first + size <= begin || first >= end || (first <= begin && first + size >= end)) continue;
            const bool in_left = first >= begin && first + size <= middle;
            const bool in_right = first >= middle && first + size <= end;
            if (!in_left && !in_right) return false;
            const int image = in_left ? first + exchange.size : first - exchange.size;
            if (signatures(first, size) != signatures(image, size)) return false;
        }
    }
    return true;
}

bool Groups::is_mirrored(int call, int group, const std::vector<Domain>& domains) const {
    const int first = groups_[call][group].outlook.last_begin, size = groups_[call][group].outlook.size;
    for (const Exchange& exchange : exchanges_) {
        const int begin = exchange.begin, middle = begin + exchange.size, end = middle + exchange.size;
        if (first < middle || first + size > end) continue;  // the exchange does not bring it forward
        bool keeps_placed = true;
        for (int other = 0; other < static_cast<int>(domains.size()) && keeps_placed; ++other) {
            if (other == call || !domains[other].is_placed) continue;
            const Outlook& mesh = groups_[other][domains[other].choices.front().group].outlook;
            const int from = mesh.last_begin, to = from + mesh.size;
            keeps_placed = to <= begin || from >= end || (from <= begin && to >= end);
        }
        if (keeps_placed) return true;
    }
    return false;
}

}  // namespace realhf::search
