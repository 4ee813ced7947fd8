// Box intersections of two layouts, stage by stage, without making boxes.
#include "reallocation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace realhf::search {
namespace {

// What every device of a pipeline stage holds, but for its part of the sharded parameters.
struct Stage {
    int layer_begin, layer_end;
    bool embedding, head;
};

struct Strategy {
    int size, tp, stage_size;
    std::vector<Stage> stages;
};

Strategy strategy_of(const ModelSizes& model, const ModelLayout& layout) {
    Strategy strategy{layout.size, layout.tp, layout.tp * layout.dp, {}};
    const int base = model.num_layers / layout.pp, extra = model.num_layers % layout.pp;
    for (int stage = 0, begin = 0; stage < layout.pp; ++stage) {
        const int end = begin + base + (stage < extra);
        const bool last = stage == layout.pp - 1;
        strategy.stages.push_back({begin, end, stage == 0 || (model.tied && last), last});
        begin = end;
    }
    return strategy;
}

// The parts of a sharded dimension that the devices hold under both of two degrees of tensor parallelism. Both divide
// the dimension, and so does their least common multiple: parts are counted in units of 1 / that, and are exact.
class SharedParts {
public:
    SharedParts(int source_tp, int target_tp)
        : source_tp_(source_tp),
          target_tp_(target_tp),
          period_(static_cast<int>(std::lcm(source_tp, target_tp))),
          parts_(static_cast<std::size_t>(source_tp) * target_tp) {
        const int a = period_ / source_tp, b = period_ / target_tp;
        for (int s = 0; s < source_tp; ++s) {
            for (int t = 0; t < target_tp; ++t) {
                parts_[s * target_tp + t] = std::max(std::min((s + 1) * a, (t + 1) * b) - std::max(s * a, t * b), 0);
            }
        }
    }

    int units() const { return period_; }  // of the whole dimension

    struct Sum {
        std::int64_t total;  // units that the devices of a run share
        int least;           // units that the one with the fewest shares
    };

    // Of `count` consecutive devices, the first of which has these numbers in its tensor-parallel groups.
    Sum over(int source_index, int target_index, int count) const {
        Sum result{0, period_};
        const int all = std::min(count, period_), rest = count % period_;
        std::int64_t beginning = 0;
        for (int i = 0, s = source_index, t = target_index; i < all; ++i) {
            if (i == rest) beginning = result.total;
            const int part = parts_[s * target_tp_ + t];
            result.total += part;
            result.least = std::min(result.least, part);
            if (++s == source_tp_) s = 0;
            if (++t == target_tp_) t = 0;
        }
        // After a period the parts come again.
        if (count > period_) result.total = result.total * (count / period_) + beginning;
        return result;
    }

private:
    int source_tp_, target_tp_, period_;
    std::vector<int> parts_;  // [source_tp x target_tp]
};

// Two strategies, on meshes at any distance.
class Pair {
public:
    Pair(const ModelSizes& model, const Strategy& source, const Strategy& target)
        : model_(model), source_(source), target_(target), shared_(source.tp, target.tp) {
        for (const Stage& stage : target.stages) needed_.push_back(held(stage, model, target.tp));
    }

    // `distance`: the target's first device minus the source's.
    Moved moved(int distance) const {
        Moved result{0, 0};
        const int begin = std::max(0, distance), end = std::min(source_.size, distance + target_.size);
        for (int t = 0; t < static_cast<int>(target_.stages.size()); ++t) {
            const int from = distance + t * target_.stage_size, to = from + target_.stage_size;
            const int first = std::max(from, begin), last = std::min(to, end);
            const int outside = target_.stage_size - std::max(last - first, 0);  // hold nothing of the model yet
            if (outside > 0) add(result, needed_[t], needed_[t] * outside);
            for (int device = first; device < last;) {  // a run: devices of one source stage
                const int s = device / source_.stage_size;
                const int count = std::min(last, (s + 1) * source_.stage_size) - device;
                add_run(result, s, t, device % source_.tp, (device - from) % target_.tp, count);
                device += count;
            }
        }
        return result;
    }

private:
    static std::int64_t held(const Stage& stage, const ModelSizes& model, int tp) {
        const std::int64_t layers = stage.layer_end - stage.layer_begin;
        std::int64_t result = layers * (model.layer_sharded / tp + model.layer_replicated);
        if (stage.embedding) result += model.embedding_sharded / tp + model.embedding_replicated;
        if (stage.head) result += model.head_sharded / tp + model.head_replicated;
        return result;
    }

    static void add(Moved& result, std::int64_t worst, std::int64_t total) {
        result.worst = std::max(result.worst, worst);
        result.total += total;
    }

    void add_run(Moved& result, int s, int t, int source_index, int target_index, int count) const {
        const Stage& a = source_.stages[s];
        const Stage& b = target_.stages[t];
        const std::int64_t layers = std::max(std::min(a.layer_end, b.layer_end) - std::max(a.layer_begin, b.layer_begin), 0);
        std::int64_t sharded = layers * model_.layer_sharded, replicated = layers * model_.layer_replicated;
        if (a.embedding && b.embedding) sharded += model_.embedding_sharded, replicated += model_.embedding_replicated;
        if (a.head && b.head) sharded += model_.head_sharded, replicated += model_.head_replicated;
        const SharedParts::Sum parts = shared_.over(source_index, target_index, count);
        const std::int64_t unit = sharded / shared_.units(), lacking = needed_[t] - replicated;
        add(result, lacking - unit * parts.least, lacking * count - unit * parts.total);
    }

    const ModelSizes& model_;
    const Strategy& source_;
    const Strategy& target_;
    SharedParts shared_;
    std::vector<std::int64_t> needed_;  // [stages of the target] elements on each device
};

// Layouts by their strategies.
struct Strategies {
    std::vector<Strategy> distinct;
    std::vector<int> of;  // [layouts]

    Strategies(const ModelSizes& model, const std::vector<ModelLayout>& layouts) {
        std::vector<ModelLayout> examples;
        for (const ModelLayout& layout : layouts) {
            const auto same = [&](const ModelLayout& example) { return example.same_strategy(layout); };
            const auto at = std::find_if(examples.begin(), examples.end(), same);
            of.push_back(static_cast<int>(at - examples.begin()));
            if (at != examples.end()) continue;
            examples.push_back(layout);
            distinct.push_back(strategy_of(model, layout));
        }
    }
};

// `most_sent`: elements that the source's devices send at most, however many are lacking.
double seconds_of(const Moved& moved, std::int64_t most_sent, int senders, const Link& link) {
    if (!moved.total) return 0;
    const double share = static_cast<double>(std::min(moved.total, most_sent)) * (1.0 / senders);
    return link.latency_s + std::max(static_cast<double>(moved.worst), share) * link.s_per_element;
}

// Seconds between a source and a target strategy, each computed when it is first asked for.
class PairSeconds {
public:
    PairSeconds(const ModelSizes& model, const Strategy& source, const Strategy& target, const Links& links,
                bool forwarding)
        : most_sent_(forwarding ? model.total() : std::numeric_limits<std::int64_t>::max()),
          pair_(model, source, target),
          links_(links),
          senders_(source.size),
          target_size_(target.size),
          overlapping_(2 * (source.size + target.size - 1), std::numeric_limits<double>::quiet_NaN()) {
        const Moved all = pair_.moved(source.size);
        apart_[false] = seconds_of(all, most_sent_, senders_, links.across_nodes);
        apart_[true] = seconds_of(all, most_sent_, senders_, links.within_node);
    }

    double operator()(int distance, bool share_a_node) {
        if (distance >= senders_ || distance <= -target_size_) return apart_[share_a_node];
        double& known = overlapping_[2 * (distance + target_size_ - 1) + share_a_node];
        if (std::isnan(known)) {
            const Link& link = share_a_node ? links_.within_node : links_.across_nodes;
            known = seconds_of(pair_.moved(distance), most_sent_, senders_, link);
        }
        return known;
    }

private:
    const std::int64_t most_sent_;
    Pair pair_;
    const Links& links_;
    int senders_, target_size_;
    double apart_[2];                  // [whether they share a node]
    std::vector<double> overlapping_;  // [distances x whether they share a node], NaN where not yet computed
};

// The node that a mesh lies in; `none` if there are several.
int node_of(const ModelLayout& layout, int devices_per_node, int none) {
    const int first = layout.first / devices_per_node, last = (layout.first + layout.size - 1) / devices_per_node;
    return first == last ? first : none;
}

}  // namespace

Moved moved(const ModelSizes& model, const ModelLayout& source, const ModelLayout& target) {
    const Strategy from = strategy_of(model, source), to = strategy_of(model, target);
    return Pair(model, from, to).moved(target.first - source.first);
}

std::vector<double> reallocation_table(const ModelSizes& model, const std::vector<ModelLayout>& sources,
                                       const std::vector<ModelLayout>& targets, const Links& links,
                                       bool forwarding) {
    const Strategies from(model, sources), to(model, targets);
    std::vector<int> target_nodes;
    for (const ModelLayout& target : targets) target_nodes.push_back(node_of(target, links.devices_per_node, -1));
    std::vector<double> table(sources.size() * targets.size());
    for (std::size_t strategy = 0; strategy < from.distinct.size(); ++strategy) {
        std::vector<PairSeconds> seconds;
        seconds.reserve(to.distinct.size());
        for (const Strategy& target : to.distinct) {
            seconds.emplace_back(model, from.distinct[strategy], target, links, forwarding);
        }
        for (std::size_t i = 0; i < sources.size(); ++i) {
            if (from.of[i] != static_cast<int>(strategy)) continue;
            const int first = sources[i].first, node = node_of(sources[i], links.devices_per_node, -2);
            double* const row = table.data() + i * targets.size();
            for (std::size_t j = 0; j < targets.size(); ++j) {
                row[j] = seconds[to.of[j]](targets[j].first - first, node == target_nodes[j]);
            }
        }
    }
    return table;
}

}  // namespace realhf::search
