// Products with packed weights. Each number is one sum, whatever else is computed with it.
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

// Instructions by which products are made, the better ones last; each rounds differently. `avx512` needs those for
// bfloat16 too, `amx` has matrix registers for bfloat16.
enum class Instructions { any, avx2, avx512, amx };

// Makes products from now on by the best ones that the processor has, but none better than `most`; returns them. Before
// the first call there is no limit.
Instructions use_instructions(Instructions most);

// Bytes of a packed weight [out, in].
int64_t packed_bytes(DType dtype, int64_t out, int64_t in);

// The weight [out, in] in that order; `by_columns`: the stride is from one column to the next, whose numbers are
// contiguous. `in` of bfloat16 is even.
void pack(DType dtype, int64_t out, int64_t in, Matrix weight, bool by_columns, void* packed);

// y [rows, out] = x [rows, in] W^T + bias, and with `adds` y += that; sums in float32, rounded where torch's operators
// round. Each number is one sum in the order of `in`, in matrix registers by blocks of 32. `bias` may be null.
void product(DType dtype, int64_t rows, int64_t out, int64_t in, Matrix x, const void* packed, const void* bias,
             bool adds, Matrix y);

}  // namespace kernels
