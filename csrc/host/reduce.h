// Element-wise sums and maxima, in the order in which the terms are added.
#pragma once

#include <cstddef>
#include <vector>

#include "host_group.h"

namespace host {

std::size_t item_bytes(DType dtype);

// Adds arrays of `count` elements into `out`. bfloat16 is added up in float and rounded once.
class Reduction {
public:
    Reduction(void* out, std::size_t count, DType dtype, Operation operation);
    // The terms may not overlap `out`.
    void add(const void* term);
    void finish();

private:
    void* out_;
    std::size_t count_;
    DType dtype_;
    Operation operation_;
    bool is_first_ = true;
    std::vector<float> wide_;
};

}  // namespace host
