// How the graph of all steps falls into parts that follow one another.
#include "segments.h"

#include <algorithm>
#include <numeric>

#include "unrolled.h"

namespace realhf::search {
namespace {

using Bits = std::vector<bool>;

// [instances][instances] whether the second comes before the first.
std::vector<Bits> ancestors_of(const Unrolled& graph) {
    const int n = graph.num_instances;
    std::vector<Bits> ancestors(n, Bits(n, false));
    for (int parent : graph.order) {
        for (int child : graph.children_of(parent)) {
            for (int i = 0; i < n; ++i) {
                if (ancestors[parent][i]) ancestors[child][i] = true;
            }
            ancestors[child][parent] = true;
        }
    }
    return ancestors;
}

// `instances` in an order in which parents come first; [nodes] which are kept.
Segment segment_of(const Unrolled& graph, const std::vector<Bits>& ancestors, const std::vector<int>& instances,
                   const Bits& kept) {
    Segment segment;
    std::vector<int> index;                      // [instances] in the segment, or -1
    std::vector<std::vector<int>> nearest;       // [instances] kept parents, over edges of those that are not
    std::vector<int> instance_of;                // [size]
    for (std::size_t i = 0; i < instances.size(); ++i) {
        nearest.emplace_back();
        for (std::size_t u = 0; u < i; ++u) {
            const auto [first, last] = graph.children_of(instances[u]);
            if (std::find(first, last, instances[i]) == last) continue;
            if (index[u] >= 0) {
                nearest[i].push_back(index[u]);
            } else {
                nearest[i].insert(nearest[i].end(), nearest[u].begin(), nearest[u].end());
            }
        }
        std::sort(nearest[i].begin(), nearest[i].end());
        nearest[i].erase(std::unique(nearest[i].begin(), nearest[i].end()), nearest[i].end());
        const int node = instances[i] % graph.num_nodes;
        index.push_back(kept[node] ? segment.size() : -1);
        if (!kept[node]) continue;
        segment.nodes.push_back(node);
        instance_of.push_back(instances[i]);
        segment.parents.push_back(nearest[i]);
    }
    const int size = segment.size();
    segment.children.resize(size);
    segment.before.resize(size);
    segment.after.resize(size);
    for (int v = 0; v < size; ++v) {
        for (int u : segment.parents[v]) segment.children[u].push_back(v);
        for (int u = 0; u < v; ++u) {
            if (!ancestors[instance_of[v]][instance_of[u]]) {
                segment.unordered.emplace_back(u, v);
                continue;
            }
            segment.before[v].push_back(u);
            segment.after[u].push_back(v);
        }
    }
    return segment;
}

// [nodes]
Bits kept_of(const Problem& problem, double negligible) {
    Bits kept(problem.calls.size(), true);
    for (const Transfer& transfer : problem.transfers) {
        kept.push_back(std::any_of(transfer.times.begin(), transfer.times.end(),
                                   [&](double time) { return time > negligible; }));
    }
    return kept;
}

}  // namespace

std::vector<Segment> segments_of(const Problem& problem, double negligible) {
    const Bits kept = kept_of(problem, negligible);
    const Unrolled graph(problem, problem.steps);
    const std::vector<Bits> ancestors = ancestors_of(graph);
    std::vector<int> num_ancestors(graph.num_instances);
    for (int i = 0; i < graph.num_instances; ++i) {
        num_ancestors[i] = static_cast<int>(std::count(ancestors[i].begin(), ancestors[i].end(), true));
    }
    std::vector<int> order(graph.num_instances);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return num_ancestors[a] < num_ancestors[b]; });

    const int num_calls = static_cast<int>(problem.calls.size());
    const auto is_kept_transfer = [&](int instance) {
        const int node = instance % graph.num_nodes;
        return node >= num_calls && kept[node];
    };
    std::vector<Segment> segments;
    std::vector<int> current;
    // Whether a barrier before order[next] would part a transfer from what it waits for, or what waits for it.
    const auto parts_a_transfer = [&](int next) {
        for (int later = next; later < graph.num_instances && num_ancestors[order[later]] == next; ++later) {
            if (is_kept_transfer(order[later])) return true;
        }
        return next < graph.num_instances && std::any_of(current.begin(), current.end(), [&](int i) {
            return is_kept_transfer(i) && std::none_of(current.begin(), current.end(),
                                                       [&](int other) { return ancestors[other][i]; });
        });
    };
    for (int k = 0; k < graph.num_instances; ++k) {
        current.push_back(order[k]);
        bool is_barrier = true;  // everything from k + 1 on comes after everything up to k
        for (int later = k + 1; later < graph.num_instances && is_barrier; ++later) {
            for (int i : current) is_barrier = is_barrier && ancestors[order[later]][i];
        }
        if (!is_barrier || parts_a_transfer(k + 1)) continue;
        const Segment segment = segment_of(graph, ancestors, current, kept);
        current.clear();
        if (segment.nodes.empty()) continue;
        const auto same = std::find_if(segments.begin(), segments.end(), [&](const Segment& other) {
            return other.nodes == segment.nodes && other.before == segment.before;
        });
        if (same == segments.end()) {
            segments.push_back(segment);
        } else {
            ++same->repeated;
        }
    }
    return segments;
}

}  // namespace realhf::search
