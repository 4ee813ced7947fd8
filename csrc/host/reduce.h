// Element-wise sums and maxima, in the order of the terms.
#pragma once

#include <cstddef>
#include <vector>

#include "host_group.h"

namespace host {

std::size_t item_bytes(DType dtype);

// The sum or maximum of arrays of `count` elements, which may not overlap `out`. bfloat16 is added up in float and
// rounded once.
void reduce(void* out, const std::vector<const void*>& terms, std::size_t count, DType dtype, Operation operation);

}  // namespace host
