// The elements of a tensor that differ from those that it had before: `realhf/realloc/execute/changes.py` sends them.
#pragma once

#include <cstdint>

namespace kernels {

// Rows of elements in memory: `count` of `bytes` each, `stride` bytes apart.
struct ElementRows {
    int64_t address, count, bytes, stride;
};

// Writes what differs between the elements of `bytes` (1, 2, 4 or 8) in `rows`, in their order, and the `elements` at
// `known`, which become those of the rows. The text at `out`: the number of changes in each block of 65,536 elements
// (uint32), their offsets in the blocks (uint16), their values. Returns its bytes: 0 where nothing differs, -1 where the
// text would not be shorter than all values, in whole elements. `out` has room for these, 4 bytes a block, and 128 bytes.
int64_t encode_changes(int64_t bytes, const ElementRows* rows, int64_t num_rows, void* known, int64_t elements,
                       uint8_t* out);

}  // namespace kernels
