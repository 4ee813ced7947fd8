// Products with packed weights, for processors with AVX-512 and its bfloat16 instructions.
//
// A decode step multiplies a few dozen rows by every weight of the model once. Tiles of as many rows as there are fill
// the registers, and the weights that come next are fetched from memory meanwhile.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace kernels {

// Outputs that lie together in a packed weight: [ceil(out / PANEL), in, PANEL], of bfloat16 in pairs
// [ceil(out / PANEL), in / 2, PANEL, 2]. Numbers behind the last output are 0.
constexpr int PANEL = 2 * LANES;

// Whether this processor computes them.
bool has_products();

// Whether products of bfloat16 are made in matrix registers (AMX) from now on: where the processor has them, unless they
// are not `wanted`. Before the first call they are where the processor has them. Both ways round differently.
bool use_matrices(bool wanted);

// Bytes of a packed weight [out, in].
int64_t packed_bytes(DType dtype, int64_t out, int64_t in);

// The weight [out, in] in that order; `by_columns`: the stride is from one column to the next, whose numbers are
// contiguous. `in` of bfloat16 is even.
void pack(DType dtype, int64_t out, int64_t in, Matrix weight, bool by_columns, void* packed);

// y [rows, out] = x [rows, in] W^T + bias, and with `adds` y += that; sums in float32, rounded where torch's operators
// round. Each number is one sum in the order of `in`, in matrix registers by blocks of 32, however many rows and outputs
// there are. `bias` may be null.
void product(DType dtype, int64_t rows, int64_t out, int64_t in, Matrix x, const void* packed, const void* bias,
             bool adds, Matrix y);

}  // namespace kernels
