// The choices that a branch and bound has left.
#include "domains.h"

#include <algorithm>
#include <map>

namespace realhf::search {
namespace {

constexpr std::size_t kMaxTable = 400'000'000;  // pairs looked at; beyond, transfers between meshes count nothing

void widen(Outlook& outlook, const Outlook& other) {
    if (other.time < outlook.time) {
        outlook.fastest_static = other.fastest_static;
        outlook.fastest_dynamic = other.fastest_dynamic;
    }
    outlook.time = std::min(outlook.time, other.time);
    outlook.area = std::min(outlook.area, other.area);
    outlook.static_bytes = std::min(outlook.static_bytes, other.static_bytes);
    outlook.dynamic_bytes = std::min(outlook.dynamic_bytes, other.dynamic_bytes);
    outlook.communicator_bytes = std::min(outlook.communicator_bytes, other.communicator_bytes);
    outlook.size = std::min(outlook.size, other.size);
    outlook.last_begin = std::max(outlook.last_begin, other.last_begin);
    outlook.first_end = std::min(outlook.first_end, other.first_end);
    for (int k = 0; k < kPrices; ++k) {
        outlook.priced[k] = std::min(outlook.priced[k], other.priced[k]);
        outlook.priced_busy[k] = std::min(outlook.priced_busy[k], other.priced_busy[k]);
    }
}

void widen(Move& move, const Move& other) {
    move.time = std::min(move.time, other.time);
    move.with_target = std::min(move.with_target, other.with_target);
    move.with_both = std::min(move.with_both, other.with_both);
}

std::size_t count(const std::vector<std::vector<int>>& groups) {
    std::size_t total = 0;
    for (const std::vector<int>& options : groups) total += options.size();
    return total;
}

}  // namespace

Groups::Groups(const Problem& problem, const std::vector<double>& prices)
    : problem_(problem), prices_(prices), sizes_(problem.calls.size()), meshes_(problem.calls.size()), mesh_of_(problem.calls.size()),
      transfers_of_(problem.transfers_of_calls()) {
    for (std::size_t c = 0; c < problem.calls.size(); ++c) {
        const std::vector<Option>& options = problem.calls[c].options;
        const auto fits = [&](const Option& option) {
            return problem.alone_bytes(option) <= problem.device_memory_bytes;
        };
        const bool any_fits = std::any_of(options.begin(), options.end(), fits);
        std::map<std::pair<int, int>, Members> by_mesh;  // by (size, first device)
        for (int i = 0; i < static_cast<int>(options.size()); ++i) {
            if (any_fits && !fits(options[i])) continue;
            const Outlook outlook = outlook_of(static_cast<int>(c), i);
            const auto [at, is_new] = by_mesh.try_emplace({options[i].size, options[i].first}, Members{{}, outlook});
            at->second.numbers.push_back(i);
            widen(at->second.outlook, outlook);
        }
        mesh_of_[c].assign(options.size(), -1);
        for (auto& [mesh, members] : by_mesh) {
            std::stable_sort(members.numbers.begin(), members.numbers.end(),
                             [&](int a, int b) { return options[a].time < options[b].time; });
            const int number = static_cast<int>(meshes_[c].size());
            for (int option : members.numbers) mesh_of_[c][option] = number;
            if (sizes_[c].empty() || sizes_[c].back().outlook.size != mesh.first) {
                sizes_[c].push_back({{}, members.outlook});
            }
            sizes_[c].back().numbers.push_back(number);
            widen(sizes_[c].back().outlook, members.outlook);
            meshes_[c].push_back(std::move(members));
        }
    }
    for (const Transfer& transfer : problem.transfers) {
        moves_.push_back({representatives(transfer, transfer.source, transfer.rows),
                          representatives(transfer, transfer.target, transfer.columns),
                          {}});
        Moves& moves = moves_.back();
        const std::vector<Members>&from = sizes_[transfer.source], &to = sizes_[transfer.target];
        const std::size_t rows = from.size() + moves.sources.size(), columns = to.size() + moves.targets.size();
        const bool too_many = count(moves.sources) > kMaxTable / count(moves.targets);
        moves.between.assign(rows * columns, too_many ? Move{} : Move{kInfinity, kInfinity, kInfinity});
        if (too_many) continue;
        const auto at = [&](std::size_t row, std::size_t column) -> Move& { return moves.between[row * columns + column]; };
        for (std::size_t i = 0; i < from.size(); ++i) {
            for (int source : from[i].numbers) {
                for (std::size_t j = 0; j < to.size(); ++j) {
                    for (int target : to[j].numbers) {
                        const Move move = least_of(transfer, moves.sources[source], moves.targets[target]);
                        at(from.size() + source, to.size() + target) = move;
                        widen(at(i, to.size() + target), move);
                        widen(at(from.size() + source, j), move);
                        widen(at(i, j), move);
                    }
                }
            }
        }
    }
    for (int size = 1; 2 * size <= problem.num_devices; size *= 2) {
        for (int begin = 0; begin + 2 * size <= problem.num_devices; begin += 2 * size) {
            const Exchange exchange{begin, begin + size, begin + 2 * size};
            if (changes_nothing(exchange)) exchanges_.push_back(exchange);
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
    Outlook outlook{option.time,  option.time * option.size,  statics, dynamic, communicator_bytes, option.size,
                    option.first, option.first + option.size, statics, dynamic, {}, {}};
    for (int k = 0; k < kPrices; ++k) {
        outlook.priced[k] = option.time + prices_[k] * statics;
        outlook.priced_busy[k] = option.time + prices_[k] * (statics + dynamic);
    }
    return outlook;
}

Outlook Groups::outlook_of(int call, const Choice& choice) const {
    if (choice.level == Level::option) return outlook_of(call, choice.number);
    return (choice.level == Level::size ? sizes_ : meshes_)[call][choice.number].outlook;
}

Outlook Groups::outlook(int call, const Domain& domain) const {
    Outlook result = outlook_of(call, {domain.level, domain.numbers[0]});
    for (int number : domain.numbers) widen(result, outlook_of(call, {domain.level, number}));
    return result;
}

Domain Groups::all(int call) const {
    Domain domain{Level::size, {}};
    for (int i = 0; i < static_cast<int>(sizes_[call].size()); ++i) domain.numbers.push_back(i);
    return domain;
}

Domain Groups::opened(int call, const Domain& domain) const {
    switch (domain.level) {
        case Level::size: return {Level::mesh, sizes_[call][domain.numbers[0]].numbers};
        case Level::mesh: return {Level::option, meshes_[call][domain.numbers[0]].numbers};
        default: return domain;
    }
}

std::size_t Groups::unit(int call, const Choice& choice) const {
    if (choice.level == Level::size) return choice.number;
    return sizes_[call].size() + (choice.level == Level::mesh ? choice.number : mesh_of_[call][choice.number]);
}

Move Groups::least_of(int transfer, const Choice& source, const Choice& target) const {
    const Transfer& t = problem_.transfers[transfer];
    const Moves& moves = moves_[transfer];
    const std::size_t columns = sizes_[t.target].size() + meshes_[t.target].size();
    const Move& between = moves.between[unit(t.source, source) * columns + unit(t.target, target)];
    if (source.level == Level::option && target.level != Level::size) {
        return target.level == Level::option ? least_of(t, {source.number}, {target.number})
                                             : least_of(t, {source.number}, moves.targets[target.number]);
    }
    if (target.level == Level::option && source.level == Level::mesh) {
        return least_of(t, moves.sources[source.number], {target.number});
    }
    return between;
}

// Options of a mesh count as the mesh as long as there are several.
Groups::Choice Groups::coarse(int call, const Domain& domain, std::size_t i) const {
    if (domain.level != Level::option || domain.numbers.size() == 1) return {domain.level, domain.numbers[i]};
    return {Level::mesh, mesh_of_[call][domain.numbers[0]]};
}

Move Groups::least(int transfer, const Domain& source, const Domain& target) const {
    const auto num_different = [](const Domain& each) { return each.level == Level::option ? 1 : each.numbers.size(); };
    const int from = problem_.transfers[transfer].source, to = problem_.transfers[transfer].target;
    Move result{kInfinity, kInfinity, kInfinity};
    for (std::size_t i = 0; i < num_different(source); ++i) {
        for (std::size_t j = 0; j < num_different(target); ++j) {
            widen(result, least_of(transfer, coarse(from, source, i), coarse(to, target, j)));
        }
    }
    return result;
}

Move Groups::least_of(const Transfer& transfer, const std::vector<int>& sources, const std::vector<int>& targets) const {
    const std::vector<Option>&from = problem_.calls[transfer.source].options, &to = problem_.calls[transfer.target].options;
    Move move{kInfinity, kInfinity, kInfinity};
    for (int source : sources) {
        double with_target = kInfinity;
        for (int target : targets) {
            const double time = problem_.transfer_time(transfer, source, target);
            move.time = std::min(move.time, time);
            with_target = std::min(with_target, time + to[target].time);
        }
        move.with_target = std::min(move.with_target, with_target);
        move.with_both = std::min(move.with_both, from[source].time + with_target);
    }
    return move;
}

// `rows` (or columns) [options of the call] are what the transfer tells apart, beside the layouts where it asks for them.
Groups::Representatives Groups::representatives(const Transfer& transfer, int call, const std::vector<int>& rows) const {
    Representatives result;
    for (const Members& mesh : meshes_[call]) {
        std::vector<std::pair<int, int>> seen;
        std::vector<int> moved;
        for (int option : mesh.numbers) {  // fastest first
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
    const auto [begin, middle, end] = exchange;
    for (int call = 0; call < static_cast<int>(meshes_.size()); ++call) {
        const auto signatures = [&](int first, int size) {
            std::vector<std::vector<double>> result;
            for (const Members& members : meshes_[call]) {
                const Outlook& mesh = members.outlook;
                if (mesh.last_begin != first || mesh.size != size) continue;
                for (int option : members.numbers) result.push_back(signature(call, option));
            }
            std::sort(result.begin(), result.end());
            return result;
        };
        for (const Members& members : meshes_[call]) {
            const int first = members.outlook.last_begin, size = members.outlook.size;
            if (exchange.keeps(first, first + size)) continue;
            const bool in_left = first >= begin && first + size <= middle;
            const bool in_right = first >= middle && first + size <= end;
            if (!in_left && !in_right) return false;
            const int image = in_left ? first + (middle - begin) : first - (middle - begin);
            if (signatures(first, size) != signatures(image, size)) return false;
        }
    }
    return true;
}

bool Groups::is_mirrored(int call, int mesh, const std::vector<Domain>& domains) const {
    const int first = meshes_[call][mesh].outlook.last_begin, size = meshes_[call][mesh].outlook.size;
    for (const Exchange& exchange : exchanges_) {
        if (first < exchange.middle || first + size > exchange.end) continue;  // it does not bring the mesh forward
        bool keeps_placed = true;
        for (int other = 0; other < static_cast<int>(domains.size()) && keeps_placed; ++other) {
            if (other == call || domains[other].level != Level::option) continue;
            const Option& placed = problem_.calls[other].options[domains[other].numbers.front()];
            keeps_placed = exchange.keeps(placed.first, placed.first + placed.size);
        }
        if (keeps_placed) return true;
    }
    return false;
}

}  // namespace realhf::search
