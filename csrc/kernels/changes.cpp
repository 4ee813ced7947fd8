#include "changes.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "vectors.h"

namespace kernels {

namespace {

constexpr int64_t kBlock = 65536, kGroupBytes = 64;  // most groups have no change

INLINE bool differ(const void* a, const void* b) {
    uint64_t x[kGroupBytes / 8], y[kGroupBytes / 8], any = 0;
    std::memcpy(x, a, kGroupBytes);
    std::memcpy(y, b, kGroupBytes);
    for (int64_t i = 0; i < kGroupBytes / 8; ++i) any |= x[i] ^ y[i];
    return any;
}

template <class Word>
struct Text {
    static constexpr int64_t kGroup = kGroupBytes / sizeof(Word);
    Word* known;
    int64_t most;  // changes that make it shorter than all values
    uint32_t* counts;
    uint16_t* offsets;
    int64_t changes = 0;

    // Elements of one block, from number `first` on.
    INLINE void compare(const Word* values, int64_t first, int64_t count) {
        Word* const before = known + first;
        const int64_t changes_before = changes;
        int64_t i = 0;
        for (; i + kGroup <= count && changes <= most; i += kGroup) {
            if (differ(values + i, before + i)) note(values + i, before + i, first + i, kGroup);
        }
        if (changes <= most) note(values + i, before + i, first + i, count - i);
        else std::memcpy(before + i, values + i, (count - i) * sizeof(Word));
        counts[first / kBlock] += static_cast<uint32_t>(changes - changes_before);
    }

    INLINE void note(const Word* values, Word* before, int64_t first, int64_t count) {
        for (int64_t j = 0; j < count; ++j) {  // without a branch, which would be guessed wrong
            offsets[changes] = static_cast<uint16_t>((first + j) % kBlock);
            changes += values[j] != before[j];
            before[j] = values[j];
        }
    }
};

template <class Word>
INLINE int64_t encode(const ElementRows* rows, int64_t num_rows, void* known, int64_t elements, uint8_t* out) {
    const int64_t blocks = (elements + kBlock - 1) / kBlock, size = sizeof(Word);
    const int64_t room = (elements - 1) * size - 4 * blocks, each = 2 + size;
    Text<Word> text{static_cast<Word*>(known), std::max<int64_t>(room, 0) / each, reinterpret_cast<uint32_t*>(out),
                    reinterpret_cast<uint16_t*>(out + 4 * blocks)};
    std::fill_n(text.counts, blocks, 0);
    int64_t done = 0;
    for (int64_t r = 0; r < num_rows; ++r) {
        for (int64_t i = 0; i < rows[r].count; ++i) {
            const Word* values = reinterpret_cast<const Word*>(rows[r].address + i * rows[r].stride);
            for (int64_t left = rows[r].bytes / size, count; left > 0; left -= count, values += count, done += count) {
                count = std::min(left, kBlock - done % kBlock);
                text.compare(values, done, count);
            }
        }
    }
    if (text.changes > text.most) return -1;
    if (!text.changes) return 0;
    const uint16_t* offset = text.offsets;
    uint8_t* end = out + 4 * blocks + 2 * text.changes;
    for (int64_t block = 0; block < blocks; ++block) {
        for (uint32_t i = 0; i < text.counts[block]; ++i, ++offset, end += size) {
            std::memcpy(end, text.known + block * kBlock + *offset, size);
        }
    }
    return end - out;
}

}  // namespace

FOR_EACH_TARGET(int64_t encode_clones(int64_t bytes, const ElementRows* rows, int64_t num_rows, void* known,
                                      int64_t elements, uint8_t* out) {
    if (bytes == 1) return encode<uint8_t>(rows, num_rows, known, elements, out);
    if (bytes == 2) return encode<uint16_t>(rows, num_rows, known, elements, out);
    if (bytes == 4) return encode<uint32_t>(rows, num_rows, known, elements, out);
    return encode<uint64_t>(rows, num_rows, known, elements, out);
})

int64_t encode_changes(int64_t bytes, const ElementRows* rows, int64_t num_rows, void* known, int64_t elements,
                       uint8_t* out) {
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) {
        throw std::invalid_argument("encode_changes: elements of 1, 2, 4 or 8 bytes only");
    }
    return encode_clones(bytes, rows, num_rows, known, elements, out);
}

}  // namespace kernels
