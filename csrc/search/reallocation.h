// How many parameters a change of layout moves, and how long that takes, in closed form.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "times.h"

namespace realhf::search {

// How a model is divided over dp x tp x pp = `size` devices.
struct ModelStrategy {
    int size, dp, tp, pp;
    int chunks = 1;   // runs of layers on each stage, pp runs apart
    int divided = 1;  // of a source: the ranks between which its devices' parts are divided (fully sharded: dp)

    bool operator<(const ModelStrategy& other) const {
        return std::tie(size, dp, tp, pp, chunks, divided) <
               std::tie(other.size, other.dp, other.tp, other.pp, other.chunks, other.divided);
    }
};

struct ModelLayout {
    int first;  // device
    ModelStrategy strategy;
};

// Elements of the parts of a model. "Sharded" parameters are divided over tp, the others are held by every rank.
struct ModelSizes {
    int num_layers;
    std::int64_t layer_sharded, layer_replicated;          // one layer
    std::int64_t embedding_sharded, embedding_replicated;  // on the first stage; learned positions are replicated
    std::int64_t head_sharded, head_replicated;            // on the last stage
    bool tied;                                             // the sharded embedding is on the last stage, too
};

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
// receives, or an equal share, for each device of the source, of what is sent, `most_sent` elements at most: devices may
// forward what several lack. Zero if nothing moves. Where two meshes lie matters only by their distance, if they
// overlap, and by whether they share a node, so that there is little to compute for millions of pairs.
PlacedTimes reallocation_times(const ModelSizes& model, const std::vector<ModelLayout>& sources,
                               const std::vector<ModelLayout>& targets, const Links& links, std::int64_t most_sent,
                               int threads);

}  // namespace realhf::search
