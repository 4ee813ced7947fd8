// Box intersections of two layouts, stage by stage, without making boxes.
#include "reallocation.h"

#include <algorithm>
#include <atomic>
#include <cmath>
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

    int num_layers() const {
        int sum = 0;
        for (const Layers& chunk : chunks) sum += chunk.end - chunk.begin;
        return sum;
    }
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

struct Strategy {
    int size, tp, stage_size, divided;
    std::vector<Stage> stages;
};

// Chunk c of stage s is stage c * pp + s of a pipeline of pp * chunks stages.
Strategy strategy_of(const ModelSizes& model, const ModelLayout& layout) {
    Strategy strategy{layout.size, layout.tp, layout.tp * layout.dp, layout.divided, {}};
    for (int stage = 0; stage < layout.pp; ++stage) {
        const bool last = stage == layout.pp - 1;
        strategy.stages.push_back({{}, stage == 0, stage == 0 || (model.tied && last), last});
    }
    const int virtual_stages = layout.pp * layout.chunks;
    const int base = model.num_layers / virtual_stages, extra = model.num_layers % virtual_stages;
    for (int stage = 0, begin = 0; stage < virtual_stages; ++stage) {
        const int end = begin + base + (stage < extra);
        strategy.stages[stage % layout.pp].chunks.push_back({begin, end});
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
        for (const Stage& stage : target.stages) {
            needed_.push_back(held(stage, model, target.tp));
            needed_by_all_ += needed_.back() * target.stage_size;
        }
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
        result.total = needed_by_all_ - (needed_by_all_ - result.total) / source_.divided;
        return result;
    }

private:
    static std::int64_t held(const Stage& stage, const ModelSizes& model, int tp) {
        const std::int64_t layers = stage.num_layers();
        std::int64_t result = layers * (model.layer_sharded / tp + model.layer_replicated);
        if (stage.first) result += model.embedding_replicated;
        if (stage.embedding) result += model.embedding_sharded / tp;
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
        const std::int64_t layers = layers_of_both(a, b);
        std::int64_t sharded = layers * model_.layer_sharded, replicated = layers * model_.layer_replicated;
        if (a.first && b.first) replicated += model_.embedding_replicated;
        if (a.embedding && b.embedding) sharded += model_.embedding_sharded;
        if (a.head && b.head) sharded += model_.head_sharded, replicated += model_.head_replicated;
        const SharedParts::Sum parts = shared_.over(source_index, target_index, count);
        const std::int64_t unit = sharded / shared_.units();
        const std::int64_t worst = needed_[t] - (replicated + unit * parts.least) / source_.divided;
        add(result, worst, (needed_[t] - replicated) * count - unit * parts.total);
    }

    const ModelSizes& model_;
    const Strategy& source_;
    const Strategy& target_;
    SharedParts shared_;
    std::vector<std::int64_t> needed_;  // [stages of the target] elements on each device
    std::int64_t needed_by_all_ = 0;
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

// How far apart two meshes are, where they overlap, and whether both lie within one and the same node.
struct Relation {
    int distance;  // the target's first device minus the source's; of meshes that do not overlap, the source's size
    bool share_a_node;
};

// The relations of meshes of two sizes, numbered as they occur.
class Relations {
public:
    Relations(int source_size, int target_size)
        : source_size_(source_size), target_size_(target_size), overlapping_(2 * (source_size + target_size - 1), -1) {}

    int number(Relation relation) {
        const bool are_apart = relation.distance >= source_size_ || relation.distance <= -target_size_;
        if (are_apart) relation.distance = source_size_;
        int& known = are_apart ? apart_[relation.share_a_node]
                               : overlapping_[2 * (relation.distance + target_size_ - 1) + relation.share_a_node];
        if (known < 0) {
            known = static_cast<int>(all_.size());
            all_.push_back(relation);
        }
        return known;
    }
    const std::vector<Relation>& all() const { return all_; }

private:
    int source_size_, target_size_;
    std::vector<int> overlapping_;  // [distances x whether they share a node]
    int apart_[2] = {-1, -1};
    std::vector<Relation> all_;
};

// Layouts by their meshes, and these by their sizes.
struct Meshes {
    struct Mesh {
        int first, size, node;  // `none` if it lies in several nodes
        std::size_t number_of_size;
    };
    std::vector<Mesh> distinct;
    std::vector<int> sizes;
    std::vector<std::uint32_t> of;  // [layouts]

    Meshes(const std::vector<ModelLayout>& layouts, int devices_per_node, int none) {
        std::map<std::pair<int, int>, std::uint32_t> numbers;
        std::map<int, std::size_t> numbers_of_sizes;
        for (const ModelLayout& layout : layouts) {
            const auto [at, is_new] = numbers.try_emplace({layout.first, layout.size}, distinct.size());
            of.push_back(at->second);
            if (!is_new) continue;
            const int node = layout.first / devices_per_node;
            const bool is_within = node == (layout.first + layout.size - 1) / devices_per_node;
            const auto size = numbers_of_sizes.try_emplace(layout.size, sizes.size());
            if (size.second) sizes.push_back(layout.size);
            distinct.push_back({layout.first, layout.size, is_within ? node : none, size.first->second});
        }
    }
    std::size_t number_of_size(int size) const { return std::find(sizes.begin(), sizes.end(), size) - sizes.begin(); }
};

}  // namespace

Moved moved(const ModelSizes& model, const ModelLayout& source, const ModelLayout& target) {
    const Strategy from = strategy_of(model, source), to = strategy_of(model, target);
    return Pair(model, from, to).moved(target.first - source.first);
}

PlacedTimes reallocation_times(const ModelSizes& model, const std::vector<ModelLayout>& sources,
                               const std::vector<ModelLayout>& targets, const Links& links, bool forwarding,
                               int threads) {
    const Strategies from(model, sources), to(model, targets);
    const Meshes source_meshes(sources, links.devices_per_node, -2), target_meshes(targets, links.devices_per_node, -1);
    const std::size_t num_sizes = target_meshes.sizes.size(), num_kinds = to.distinct.size();
    std::vector<Relations> relations;  // [sizes of sources x sizes of targets]
    for (int source : source_meshes.sizes) {
        for (int target : target_meshes.sizes) relations.emplace_back(source, target);
    }
    PlacedTimes times;
    for (const Meshes::Mesh& a : source_meshes.distinct) {
        for (const Meshes::Mesh& b : target_meshes.distinct) {
            Relations& of_sizes = relations[a.number_of_size * num_sizes + b.number_of_size];
            times.relations.push_back(of_sizes.number({b.first - a.first, a.node == b.node}));
        }
    }
    const auto relations_of = [&](const Strategy& source, const Strategy& target) -> const std::vector<Relation>& {
        const std::size_t row = source_meshes.number_of_size(source.size);
        return relations[row * num_sizes + target_meshes.number_of_size(target.size)].all();
    };
    std::size_t size = 0;
    for (const Strategy& source : from.distinct) {
        for (const Strategy& target : to.distinct) {
            times.begins.push_back(static_cast<std::uint32_t>(size));
            size += relations_of(source, target).size();
        }
    }
    if (size > std::numeric_limits<std::uint32_t>::max()) throw std::invalid_argument("too many layouts");
    times.numbers.resize(size);
    const std::int64_t most_sent = forwarding ? model.total() : std::numeric_limits<std::int64_t>::max();
    const auto fill = [&](std::size_t kind) {
        const Strategy& source = from.distinct[kind];
        for (std::size_t other = 0; other < num_kinds; ++other) {
            double* number = times.numbers.data() + times.begins[kind * num_kinds + other];
            const Pair pair(model, source, to.distinct[other]);
            for (const Relation& relation : relations_of(source, to.distinct[other])) {
                const Link& link = relation.share_a_node ? links.within_node : links.across_nodes;
                *number++ = seconds_of(pair.moved(relation.distance), most_sent, source.size, link);
            }
        }
    };
    std::atomic<std::size_t> next{0};  // whoever is free takes the numbers of the next strategy
    on_threads(std::max(threads, 1), [&](int) {
        for (std::size_t kind; (kind = next++) < from.distinct.size();) fill(kind);
    });
    for (std::size_t i = 0; i < sources.size(); ++i) {
        times.sources.push_back({static_cast<std::uint32_t>(from.of[i] * num_kinds),
                                 static_cast<std::uint32_t>(source_meshes.of[i] * target_meshes.distinct.size())});
    }
    for (std::size_t j = 0; j < targets.size(); ++j) {
        times.targets.push_back({static_cast<std::uint32_t>(to.of[j]), target_meshes.of[j]});
    }
    return times;
}

}  // namespace realhf::search
