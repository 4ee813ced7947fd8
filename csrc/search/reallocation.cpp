// Box intersections of two layouts, stage by stage, without making boxes.
#include "reallocation.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "threads.h"

namespace realhf::search {
namespace {

// What every device of a pipeline stage holds, but for its part of the sharded parameters.
struct Layers {
    int begin, end;
};

struct Stage {
    std::vector<Layers> chunks;  // in their order
    bool first, embedding, head;
};

int layers_of_both(const Stage& one, const Stage& other) {
    int sum = 0;
    for (auto a = one.chunks.begin(), b = other.chunks.begin(); a != one.chunks.end() && b != other.chunks.end();) {
        sum += std::max(std::min(a->end, b->end) - std::max(a->begin, b->begin), 0);
        if (a->end < b->end) ++a;
        else ++b;
    }
    return sum;
}

// A strategy, stage by stage.
struct Stages {
    int size, tp, stage_size, divided;
    std::vector<Stage> stages;
};

// Chunk c of stage s is stage c * pp + s of a pipeline of pp * chunks stages.
Stages stages_of(const ModelSizes& model, const ModelStrategy& strategy) {
    Stages result{strategy.size, strategy.tp, strategy.tp * strategy.dp, strategy.divided, {}};
    for (int stage = 0; stage < strategy.pp; ++stage) {
        const bool last = stage == strategy.pp - 1;
        result.stages.push_back({{}, stage == 0, stage == 0 || (model.tied && last), last});
    }
    const int virtual_stages = strategy.pp * strategy.chunks;
    const int base = model.num_layers / virtual_stages, extra = model.num_layers % virtual_stages;
    for (int stage = 0, begin = 0; stage < virtual_stages; ++stage) {
        const int end = begin + base + (stage < extra);
        result.stages[stage % strategy.pp].chunks.push_back({begin, end});
        begin = end;
    }
    return result;
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

struct Moved {
    std::int64_t worst;  // elements that the worst destination device lacks
    std::int64_t total;  // elements that all destination devices lack
};

// Two strategies, on meshes at any distance.
class Pair {
public:
    Pair(const ModelSizes& model, const Stages& source, const Stages& target)
        : model_(model), source_(source), target_(target), shared_(source.tp, target.tp) {
        for (const Stage& stage : target.stages) {
            const auto [sharded, replicated] = held_by_both(stage, stage);
            needed_.push_back(sharded / target.tp + replicated);
            needed_by_all_ += needed_.back() * target.stage_size;
        }
    }

    // What the target's devices lack that they need, given what they hold under the source: the size of the target's
    // boxes minus the size of their intersection with the source's boxes on the same device, or, where these are
    // divided, minus an equal share of it. `distance`: the target's first device minus the source's.
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
        result.total = needed_by_all_ - (needed_by_all_ - result.total) / source_.divided;
        return result;
    }

private:
    struct Elements {
        std::int64_t sharded, replicated;
    };

    // Of all tensor-parallel ranks together.
    Elements held_by_both(const Stage& a, const Stage& b) const {
        const std::int64_t layers = layers_of_both(a, b);
        Elements both{layers * model_.layer_sharded, layers * model_.layer_replicated};
        if (a.first && b.first) both.replicated += model_.embedding_replicated;
        if (a.embedding && b.embedding) both.sharded += model_.embedding_sharded;
        if (a.head && b.head) both.sharded += model_.head_sharded, both.replicated += model_.head_replicated;
        return both;
    }

    static void add(Moved& result, std::int64_t worst, std::int64_t total) {
        result.worst = std::max(result.worst, worst);
        result.total += total;
    }

    void add_run(Moved& result, int s, int t, int source_index, int target_index, int count) const {
        const auto [sharded, replicated] = held_by_both(source_.stages[s], target_.stages[t]);
        const SharedParts::Sum parts = shared_.over(source_index, target_index, count);
        const std::int64_t unit = sharded / shared_.units();
        const std::int64_t worst = needed_[t] - (replicated + unit * parts.least) / source_.divided;
        add(result, worst, (needed_[t] - replicated) * count - unit * parts.total);
    }

    const ModelSizes& model_;
    const Stages& source_;
    const Stages& target_;
    SharedParts shared_;
    std::vector<std::int64_t> needed_;  // [stages of the target] elements on each device
    std::int64_t needed_by_all_ = 0;
};

// `most_sent`: elements that the source's devices send at most, however many are lacking.
double seconds_of(const Moved& moved, std::int64_t most_sent, int senders, const Link& link) {
    if (!moved.total) return 0;
    const double share = static_cast<double>(std::min(moved.total, most_sent)) * (1.0 / senders);
    return link.latency_s + std::max(static_cast<double>(moved.worst), share) * link.s_per_element;
}

// How far apart two meshes are: the target's first device minus the source's, or of meshes that do not overlap the
// source's size; and whether both lie within one and the same node.
using Relation = std::pair<int, bool>;
using Mesh = std::pair<int, int>;  // first device, devices

// Values in the order in which they occur for the first time.
template <typename Value>
class Distinct {
public:
    std::uint32_t number(const Value& value) {
        const auto [at, is_new] = numbers_.try_emplace(value, static_cast<std::uint32_t>(values_.size()));
        if (is_new) values_.push_back(value);
        return at->second;
    }
    const std::vector<Value>& values() const { return values_; }

private:
    std::map<Value, std::uint32_t> numbers_;
    std::vector<Value> values_;
};

}  // namespace

PlacedTimes reallocation_times(const ModelSizes& model, const std::vector<ModelLayout>& sources,
                               const std::vector<ModelLayout>& targets, const Links& links, std::int64_t most_sent,
                               int threads) {
    Distinct<ModelStrategy> source_kinds, target_kinds;
    Distinct<Mesh> source_meshes, target_meshes;
    PlacedTimes times;
    for (const auto& [first, strategy] : targets) {
        times.targets.push_back({target_kinds.number(strategy), target_meshes.number({first, strategy.size})});
    }
    const auto num_kinds = static_cast<std::uint32_t>(target_kinds.values().size());
    const auto num_meshes = static_cast<std::uint32_t>(target_meshes.values().size());
    for (const auto& [first, strategy] : sources) {
        times.sources.push_back({source_kinds.number(strategy) * num_kinds,
                                 source_meshes.number({first, strategy.size}) * num_meshes});
    }
    std::vector<Stages> from, to;
    for (const ModelStrategy& strategy : source_kinds.values()) from.push_back(stages_of(model, strategy));
    for (const ModelStrategy& strategy : target_kinds.values()) to.push_back(stages_of(model, strategy));
    std::map<std::pair<int, int>, Distinct<Relation>> relations;  // by the sizes of source and target
    for (const auto& [a, a_size] : source_meshes.values()) {
        for (const auto& [b, b_size] : target_meshes.values()) {
            const bool are_apart = b >= a + a_size || a >= b + b_size;
            const int last = std::max(a + a_size, b + b_size) - 1;
            const bool share_a_node = std::min(a, b) / links.devices_per_node == last / links.devices_per_node;
            times.relations.push_back(relations[{a_size, b_size}].number({are_apart ? a_size : b - a, share_a_node}));
        }
    }
    std::size_t size = 0;
    for (const Stages& source : from) {
        for (const Stages& target : to) {
            times.begins.push_back(static_cast<std::uint32_t>(size));
            size += relations.at({source.size, target.size}).values().size();
        }
    }
    if (size > std::numeric_limits<std::uint32_t>::max()) throw std::invalid_argument("too many layouts");
    times.numbers.resize(size);
    const auto fill = [&](std::size_t kind) {
        double* number = times.numbers.data() + times.begins[kind * num_kinds];
        for (const Stages& target : to) {
            const Pair pair(model, from[kind], target);
            for (const auto& [distance, share_a_node] : relations.at({from[kind].size, target.size}).values()) {
                const Link& link = share_a_node ? links.within_node : links.across_nodes;
                *number++ = seconds_of(pair.moved(distance), most_sent, from[kind].size, link);
            }
        }
    };
    std::atomic<std::size_t> next{0};  // whoever is free takes the numbers of the next strategy
    on_threads(threads, [&](int) {
        for (std::size_t kind; (kind = next++) < from.size();) fill(kind);
    });
    return times;
}

}  // namespace realhf::search
