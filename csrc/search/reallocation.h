// How many parameters a change of layout moves, and how long that takes, in closed form.
#pragma once

#include <cstdint>
#include <vector>

#include "times.h"

namespace realhf::search {

struct ModelLayout {
    int first, size, dp, tp, pp;
    int chunks = 1;   // runs of layers on each stage, pp runs apart
    int divided = 1;  // of a source: between so many ranks its devices' parts are divided (fully sharded: dp)

    bool same_strategy(const ModelLayout& other) const {
        return size == other.size && dp == other.dp && tp == other.tp && pp == other.pp && chunks == other.chunks &&
               divided == other.divided;
    }
};

// Elements of the parts of a model. "Sharded" parameters are divided over tp, the others are held by every rank.
struct ModelSizes {
    int num_layers;
    std::int64_t layer_sharded, layer_replicated;          // one layer
    std::int64_t embedding_sharded, embedding_replicated;  // on the first stage; learned positions are replicated
    std::int64_t head_sharded, head_replicated;            // on the last stage
    bool tied;                                             // the sharded embedding is on the last stage, too

    std::int64_t total() const {
        return num_layers * (layer_sharded + layer_replicated) + embedding_sharded + embedding_replicated + head_sharded +
               head_replicated;
    }
};

struct Moved {
    std::int64_t worst;  // elements that the worst destination device lacks
    std::int64_t total;  // elements that all destination devices lack
};

// What the devices of `target` lack that they need, given what they hold under `source`: the size of the target's
// boxes minus the size of their intersection with the source's boxes on the same device, or, where these are divided,
// minus an equal share of it.
Moved moved(const ModelSizes& model, const ModelLayout& source, const ModelLayout& target);

// A message takes latency_s + elements x s_per_element.
struct Link {
    double latency_s, s_per_element;
};

// The first is used where both meshes lie within one and the same node.
struct Links {
    Link within_node, across_nodes;
    int devices_per_node;
};

// Seconds of the reallocations of sources x targets. The time is that of the busiest link: the most that a device
// receives, or an equal share, for each device of the source, of what is sent: with `forwarding` of the model at most,
// since devices forward what several lack. Zero if nothing moves. Where two meshes lie matters only by their distance,
// if they overlap, and by whether they share a node, so that there is little to compute for millions of pairs.
PlacedTimes reallocation_times(const ModelSizes& model, const std::vector<ModelLayout>& sources,
                               const std::vector<ModelLayout>& targets, const Links& links, bool forwarding = true,
                               int threads = 1);

}  // namespace realhf::search
