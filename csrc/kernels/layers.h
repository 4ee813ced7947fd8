// The operations between the matrix products of a decoder layer, each in one pass over its tokens, and their gradients,
// for the CPU.
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

// The gradients of rms_norm, given that of its output: of x, and of the weight [width], in float64.
void rms_norm_gradient(DType dtype, int64_t rows, int64_t width, Matrix x, const void* weight, float epsilon,
                       Matrix grad, Matrix grad_x, double* grad_weight);

// The gradients of gated_silu, given that of its output.
void gated_silu_gradient(DType dtype, int64_t rows, int64_t width, Matrix gate, Matrix up, Matrix grad,
                         Matrix grad_gate, Matrix grad_up);

// to += the sum of `leaves` vectors of `count` numbers: of neighbours, then of these sums; an odd number of them from left
// to right. Rounded once before it is added.
void add_tree(DType dtype, int64_t leaves, int64_t count, const void* vectors, void* to);

// The sum of the squares of `count` numbers, in float64.
double square_sum(DType dtype, int64_t count, const void* numbers);

}  // namespace kernels
