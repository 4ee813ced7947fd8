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
    std::vector<int> waits = graph.num_parents, order;
    for (int i = 0; i < n; ++i) {
        if (waits[i] == 0) order.push_back(i);
    }
    for (std::size_t k = 0; k < order.size(); ++k) {
        const int parent = order[k];
        for (int c = graph.first_child[parent]; c < graph.first_child[parent + 1]; ++c) {
            const int child = graph.children[c];
            for (int i = 0; i < n; ++i) {
                if (ancestors[parent][i]) ancestors[child][i] = true;
            }
            ancestors[child][parent] = true;
            if (--waits[child] == 0) order.push_back(child);
        }
    }
    return ancestors;
}

Segment segment_of(const Unrolled& graph, const std::vector<Bits>& ancestors, const std::vector<int>& instances) {
    Segment segment;
    const int size = static_cast<int>(instances.size());
    segment.parents.resize(size);
    segment.children.resize(size);
    segment.before.resize(size);
    segment.after.resize(size);
    for (int v = 0; v < size; ++v) {
        segment.nodes.push_back(instances[v] % graph.num_nodes);
        for (int u = 0; u < v; ++u) {
            if (!ancestors[instances[v]][instances[u]]) {
                segment.unordered.emplace_back(u, v);
                continue;
            }
            segment.before[v].push_back(u);
            segment.after[u].push_back(v);
            const auto first = graph.children.begin() + graph.first_child[instances[u]];
            const auto last = graph.children.begin() + graph.first_child[instances[u] + 1];
            if (std::find(first, last, instances[v]) == last) continue;
            segment.parents[v].push_back(u);
            segment.children[u].push_back(v);
        }
    }
    return segment;
}

}  // namespace

std::vector<Segment> segments_of(const Problem& problem) {
    const Unrolled graph(problem, problem.steps);
    const std::vector<Bits> ancestors = ancestors_of(graph);
    std::vector<int> num_ancestors(graph.num_instances);
    for (int i = 0; i < graph.num_instances; ++i) {
        num_ancestors[i] = static_cast<int>(std::count(ancestors[i].begin(), ancestors[i].end(), true));
    }
    std::vector<int> order(graph.num_instances);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return num_ancestors[a] < num_ancestors[b]; });

    std::vector<Segment> segments;
    std::vector<int> current;
    for (int k = 0; k < graph.num_instances; ++k) {
        current.push_back(order[k]);
        bool is_barrier = true;  // everything from k + 1 on comes after everything up to k
        for (int later = k + 1; later < graph.num_instances && is_barrier; ++later) {
            for (int i : current) is_barrier = is_barrier && ancestors[order[later]][i];
        }
        if (!is_barrier) continue;
        const Segment segment = segment_of(graph, ancestors, current);
        current.clear();
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
