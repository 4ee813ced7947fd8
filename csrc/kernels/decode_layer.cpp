#include "decode_layer.h"

#include <cmath>

#include "layers.h"
#include "products.h"

namespace kernels {

void decode_layer(DType dtype, LayerShape shape, const LayerWeights& weights, void* x, const void* cosine,
                  const void* sine, Cache cache, Sequences sequences, int64_t window, void* buffer) {
    const int64_t rows = sequences.count, hidden = shape.hidden, query = shape.query(), inner = shape.inner;
    const Shape heads = shape.heads;
    const int64_t item = dtype == DType::bfloat16 ? 2 : 4;
    const auto columns = [&](Matrix of, int64_t first) {
        return Matrix{static_cast<char*>(of.data) + first * item, of.stride};
    };
    const auto behind = [&](Matrix of, int64_t width) {
        return Matrix{static_cast<char*>(of.data) + rows * of.stride * item, width};
    };
    const Matrix state{x, hidden}, normed{buffer, hidden}, qkv = behind(normed, shape.qkv());
    const Matrix mixed = behind(qkv, query), gate_up = behind(mixed, 2 * inner), sums = behind(gate_up, hidden);
    const auto add_product = [&](Matrix of, int64_t width, const void* weight) {
        if (shape.leaves == 1) return product(dtype, rows, hidden, width, of, weight, nullptr, true, state);
        const int64_t part = width / shape.leaves, bytes = packed_bytes(dtype, hidden, part);
        for (int64_t i = 0; i < shape.leaves; ++i)
            product(dtype, rows, hidden, part, columns(of, i * part), static_cast<const char*>(weight) + i * bytes,
                    nullptr, false, {static_cast<char*>(sums.data) + i * rows * hidden * item, hidden});
        add_tree(dtype, shape.leaves, rows * hidden, sums.data, state.data);
    };

    rms_norm(dtype, rows, hidden, state, weights.input_norm, weights.epsilon, normed);
    product(dtype, rows, shape.qkv(), hidden, normed, weights.qkv, weights.qkv_bias, false, qkv);
    const Matrix key = columns(qkv, query), value = columns(key, heads.kv_heads * heads.head_dim);
    rotate(dtype, rows, heads.kv_heads * heads.group, heads.head_dim, qkv, cosine, sine, qkv);
    rotate(dtype, rows, heads.kv_heads, heads.head_dim, key, cosine, sine, key);
    const double scale = 1 / std::sqrt(static_cast<double>(heads.head_dim));
    attend(dtype, heads, cache, sequences, qkv, key, value, scale, window, mixed.data);
    add_product(mixed, query, weights.output);

    rms_norm(dtype, rows, hidden, state, weights.post_norm, weights.epsilon, normed);
    product(dtype, rows, 2 * inner, hidden, normed, weights.gate_up, nullptr, false, gate_up);
    gated_silu(dtype, rows, inner, gate_up, columns(gate_up, inner), gate_up);
    add_product(gate_up, inner, weights.down);
}

}  // namespace kernels
