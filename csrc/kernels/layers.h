// What stands between the matrix products of a decoder layer, each in one pass over its tokens, for the CPU.
//
// All of it computes in float32, and rounds to the dtype of its tensors wherever the same in separate operations of
// torch does. Rows lie `stride` elements apart; a row's numbers are contiguous.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace kernels {

// out = x / sqrt(mean(x^2) + epsilon) * weight of each row [width].
void rms_norm(DType dtype, int64_t rows, int64_t width, Matrix x, const void* weight, float epsilon, Matrix out);

// out = x [rows, heads * head_dim] rotated; the halves of a head are the two coordinates. cosine and sine are
// [rows, head_dim].
void rotate(DType dtype, int64_t rows, int64_t heads, int64_t head_dim, Matrix x, const void* cosine, const void* sine,
            Matrix out);

// out = silu(gate) * up of each row [width].
void gated_silu(DType dtype, int64_t rows, int64_t width, Matrix gate, Matrix up, Matrix out);

}  // namespace kernels
