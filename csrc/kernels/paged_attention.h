// Attention of one new token a sequence over keys and values in pages, for the CPU.
//
// A page holds PAGE tokens of one layer. Its keys lie as [kv_heads, head_dim, PAGE] and its values as
// [kv_heads, PAGE, head_dim]: a vector register takes one coordinate of all keys of a page, and then a run of
// coordinates of one value, so that neither loop adds up across a register. Numbers behind a sequence's end are never
// used. Places, pages and lengths that lie outside of the cache or of a table throw std::out_of_range.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace kernels {

constexpr int PAGE = LANES;

struct Shape {
    int64_t kv_heads;
    int64_t group;  // query heads that share a kv head
    int64_t head_dim;
};

struct Cache {
    void* keys;
    void* values;
    int64_t pages;
};

// The pages of the sequences: row i of `table`, `stride` wide, lists those of sequence i in order.
struct Sequences {
    int64_t count;
    const int32_t* table;
    int64_t stride;
    const int64_t* lengths;  // tokens in the cache, without the new one
};

// Puts the key and the value [kv_heads, head_dim] of token i at `places[i]` = page * PAGE + place in the page.
void write(DType dtype, Shape shape, Cache cache, int64_t tokens, const int64_t* places, Matrix key, Matrix value);

// Writes keys and values of the new tokens, one a sequence, behind their sequences; `out` gets
// softmax(scale * query keys^T) values, [count, kv_heads * group, head_dim], over the sequence and the new token.
// With `window` > 0 only the last `window` of these are attended to.
void attend(DType dtype, Shape shape, Cache cache, Sequences sequences, Matrix query, Matrix key, Matrix value,
            double scale, int64_t window, void* out);

}  // namespace kernels
