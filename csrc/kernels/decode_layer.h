// A whole decoder layer of a decode step: one new token a sequence, over keys and values in pages, for the CPU.
//
// For layers with RMS norms, rotary positions and a gated SiLU MLP. The same kernels one after the other, with the same
// rounding as when each is called alone; their intermediate results stay in one buffer.
#pragma once

#include "paged_attention.h"
#include "vectors.h"

namespace kernels {

struct LayerShape {
    int64_t hidden;
    Shape heads;
    int64_t inner;  // the MLP's
    int64_t leaves = 1;  // equal parts of the inputs of `output` and `down`, whose products are added up in a tree

    int64_t query() const { return heads.kv_heads * heads.group * heads.head_dim; }
    int64_t qkv() const { return query() + 2 * heads.kv_heads * heads.head_dim; }
    // Elements of the buffer that a row needs.
    int64_t buffer() const { return hidden + qkv() + query() + 2 * inner + (leaves > 1 ? leaves * hidden : 0); }
};

// Products are packed (`products.h`); qkv and gate_up are those of their parts, one behind the other. Each of the leaves
// of output and down is packed alone.
struct LayerWeights {
    const void *input_norm, *qkv, *qkv_bias, *output, *post_norm, *gate_up, *down;
    float epsilon;
};

// x [sequences, hidden] becomes what the layer returns of it. cosine and sine are [sequences, head_dim].
void decode_layer(DType dtype, LayerShape shape, const LayerWeights& weights, void* x, const void* cosine,
                  const void* sine, Cache cache, Sequences sequences, int64_t window, void* buffer);

}  // namespace kernels
