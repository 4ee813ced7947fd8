// Changes of a plan that a search tries.
#include "moves.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace realhf::search {
namespace {

// `any_strategy`: which one it is makes no difference to memory.
bool dominates(const Problem& problem, const Option& a, const Option& b, bool any_strategy) {
    if (!any_strategy && a.strategy != b.strategy) return false;
    const std::vector<int>& of_a = problem.communicators[a.communicators];
    const std::vector<int>& of_b = problem.communicators[b.communicators];
    if (!std::includes(of_b.begin(), of_b.end(), of_a.begin(), of_a.end())) return false;
    bool better = false;
    for (const auto cost : {&Option::time, &Option::static_bytes, &Option::dynamic_bytes, &Option::copy_bytes}) {
        if (a.*cost > b.*cost) return false;
        better = better || a.*cost < b.*cost;
    }
    return better;
}

void set(Change& change, Plan& plan, int call, int option) {
    change.call[change.count] = call;
    change.before[change.count] = plan[call];
    ++change.count;
    plan[call] = option;
}

}  // namespace

Moves::Moves(const Problem& problem) : problem_(problem), calls_(problem.calls.size()) {
    std::map<std::pair<int, int>, int> meshes;
    std::map<std::tuple<int, int, int>, int> layouts;
    for (std::size_t c = 0; c < problem.calls.size(); ++c) {
        for (const Option& option : problem.calls[c].options) {
            const int mesh = meshes.emplace(std::pair{option.first, option.size}, meshes.size()).first->second;
            const std::tuple layout{option.first, option.size, option.strategy};
            calls_[c].mesh_of.push_back(mesh);
            calls_[c].layout_of.push_back(layouts.emplace(layout, layouts.size()).first->second);
        }
    }
    meshes_.resize(meshes.size());
    for (const auto& [mesh, number] : meshes) meshes_[number] = mesh;
    for (std::size_t c = 0; c < problem.calls.size(); ++c) {
        Index& index = calls_[c];
        const std::vector<Option>& options = problem.calls[c].options;
        const bool any_strategy = problem.calls[c].spared.bytes.empty();
        std::vector<std::vector<int>> members(meshes.size());
        index.by_mesh.resize(meshes.size());
        index.by_layout.resize(layouts.size());
        for (int i = 0; i < static_cast<int>(options.size()); ++i) {
            members[index.mesh_of[i]].push_back(i);
            index.by_layout[index.layout_of[i]].push_back(i);
        }
        for (std::size_t mesh = 0; mesh < members.size(); ++mesh) {
            for (int i : members[mesh]) {
                const auto dominates_it = [&](int j) { return dominates(problem, options[j], options[i], any_strategy); };
                const bool kept = std::none_of(members[mesh].begin(), members[mesh].end(), dominates_it);
                if (kept) index.by_mesh[mesh].push_back(i), index.frontier.push_back(i);
            }
        }
        const auto faster = [&](int i, int j) { return j < 0 || options[i].time < options[j].time; };
        index.fastest.assign(meshes.size(), -1);
        int of_all = -1;
        for (int i : index.frontier) {
            if (problem.alone_bytes(options[i]) > problem.device_memory_bytes) continue;
            int& of_mesh = index.fastest[index.mesh_of[i]];
            if (faster(i, of_mesh)) of_mesh = i;
            if (faster(i, of_all)) of_all = i;
        }
        index.fastest_of_all = std::max(of_all, 0);
    }
}

Plan Moves::divided(Random& random) const {
    const int a = random.below(calls_.size());
    const int one = calls_[a].mesh_of[random.pick(calls_[a].frontier)];
    const auto [first, size] = meshes_[one];
    std::vector<int> beside;  // the largest that do not overlap it
    for (int mesh = 0; mesh < static_cast<int>(meshes_.size()); ++mesh) {
        const auto [other_first, other_size] = meshes_[mesh];
        if (other_first < first + size && first < other_first + other_size) continue;
        if (!beside.empty() && other_size < meshes_[beside[0]].second) continue;
        if (!beside.empty() && other_size > meshes_[beside[0]].second) beside.clear();
        beside.push_back(mesh);
    }
    const int two = beside.empty() ? one : random.pick(beside);
    Plan plan;
    for (const Index& index : calls_) {
        const int part = random.below(3);
        const int chosen = part == 0 ? index.fastest_of_all : index.fastest[part == 1 ? one : two];
        plan.push_back(chosen < 0 ? index.fastest_of_all : chosen);
    }
    return plan;
}

Change Moves::single(Plan& plan, Random& random) const {
    Change change;
    const int call = random.below(plan.size());
    set(change, plan, call, random.below(problem_.calls[call].options.size()));
    return change;
}

Change Moves::coupled(Plan& plan, Random& random) const {
    Change change;
    const int a = random.below(plan.size()), b = random.below(plan.size());
    const Index& of_a = calls_[a];
    const Index& of_b = calls_[b];
    const double kind = random.uniform();
    if (kind < 0.10) return single(plan, random);
    if (kind < 0.40 || (kind >= 0.60 && a == b)) {
        set(change, plan, a, random.pick(of_a.frontier));
    } else if (kind < 0.60) {  // another strategy on the same mesh
        const std::vector<int>& same = of_a.by_mesh[of_a.mesh_of[plan[a]]];
        set(change, plan, a, random.pick(same));
    } else if (kind < 0.72) {
        set(change, plan, a, random.pick(of_a.frontier));
        set(change, plan, b, random.pick(of_b.frontier));
    } else if (kind < 0.80) {  // the layout of another call: nothing to reallocate
        const std::vector<int>& same = of_b.by_layout[of_a.layout_of[plan[a]]];
        if (!same.empty()) set(change, plan, b, random.pick(same));
    } else if (kind < 0.92) {  // both onto one new mesh
        const int option = random.pick(of_a.frontier);
        const std::vector<int>& same = of_b.by_mesh[of_a.mesh_of[option]];
        set(change, plan, a, option);
        if (!same.empty()) set(change, plan, b, random.pick(same));
    } else {  // each onto the other's mesh
        const std::vector<int>& for_a = of_a.by_mesh[of_b.mesh_of[plan[b]]];
        const std::vector<int>& for_b = of_b.by_mesh[of_a.mesh_of[plan[a]]];
        if (!for_a.empty() && !for_b.empty()) {
            set(change, plan, a, random.pick(for_a));
            set(change, plan, b, random.pick(for_b));
        }
    }
    return change;
}

}  // namespace realhf::search
