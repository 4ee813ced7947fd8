#include "bit_sums.h"

#include <stdexcept>

#include "vectors.h"

namespace kernels {

namespace {

// As `_factors` in `realhf/realloc/execute/checksum.py` has it. Signed, so that a product is one instruction.
constexpr uint32_t kOfPlace = 0x2545F491u, kOfMixed = 4 * 0x1851F42Du;

template <class Word>
INLINE uint64_t sum_of(int64_t rows, int64_t words, const void* data, int64_t stride, int64_t first, int64_t step) {
    uint64_t total = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const Word* const row = static_cast<const Word*>(data) + r * stride;
        uint32_t multiplied = static_cast<uint32_t>(first + r * step) * kOfPlace;
        uint64_t sum = 0;
        for (int64_t i = 0; i < words; ++i, multiplied += kOfPlace) {
            uint32_t mixed = multiplied & 0x3FFFFFFFu;
            mixed ^= mixed >> 15;
            const int32_t factor = static_cast<int32_t>(mixed * kOfMixed + 1);
            sum += static_cast<uint64_t>(static_cast<int64_t>(row[i]) * factor);
        }
        total += sum;
    }
    return total;
}

}  // namespace

FOR_EACH_TARGET(uint64_t sum_clones(int64_t bytes, int64_t rows, int64_t words, const void* data, int64_t stride,
                                    int64_t first, int64_t step) {
    if (bytes == 1) return sum_of<int8_t>(rows, words, data, stride, first, step);
    if (bytes == 2) return sum_of<int16_t>(rows, words, data, stride, first, step);
    return sum_of<int32_t>(rows, words, data, stride, first, step);
})

int64_t bit_sum(int64_t bytes, int64_t rows, int64_t words, const void* data, int64_t stride, int64_t first,
                int64_t step) {
    if (bytes != 1 && bytes != 2 && bytes != 4) throw std::invalid_argument("bit_sum: words of 1, 2 or 4 bytes only");
    return static_cast<int64_t>(sum_clones(bytes, rows, words, data, stride, first, step));
}

}  // namespace kernels
