// Sums of the bits of tensors in which every place has a factor of its own: `realhf/realloc/execute/checksum.py` says
// what they notice.
#pragma once

#include <cstdint>

namespace kernels {

// The sum modulo 2^64 of word * factor(place) over `rows` of `words` signed words of 1, 2 or 4 `bytes`. Rows lie
// `stride` words apart; word i of row r has place first + r * step + i.
int64_t bit_sum(int64_t bytes, int64_t rows, int64_t words, const void* data, int64_t stride, int64_t first,
                int64_t step);

}  // namespace kernels
