#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace host {

namespace {

// NaN is handed on by both, as torch does.
template <typename T>
void combine(T* out, const T* term, std::size_t count, Operation operation) {
    if (operation == Operation::sum) {
        for (std::size_t i = 0; i < count; ++i) out[i] += term[i];
    } else {
        for (std::size_t i = 0; i < count; ++i) out[i] = (term[i] > out[i] || term[i] != term[i]) ? term[i] : out[i];
    }
}

float widen(std::uint16_t value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// To the nearest bfloat16, ties to the even one.
std::uint16_t narrow(float value) {
    if (std::isnan(value)) return 0x7fc0;
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
void reduce_as(void* out, const std::vector<const void*>& terms, std::size_t count, Operation operation) {
    std::memcpy(out, terms[0], count * sizeof(T));
    for (std::size_t i = 1; i < terms.size(); ++i) {
        combine(static_cast<T*>(out), static_cast<const T*>(terms[i]), count, operation);
    }
}

void reduce_bfloat16(void* out, const std::vector<const void*>& terms, std::size_t count, Operation operation) {
    std::vector<float> result(count), wide(count);
    for (std::size_t i = 0; i < terms.size(); ++i) {
        const auto* term = static_cast<const std::uint16_t*>(terms[i]);
        std::transform(term, term + count, (i == 0 ? result : wide).begin(), widen);
        if (i > 0) combine(result.data(), wide.data(), count, operation);
    }
    std::transform(result.begin(), result.end(), static_cast<std::uint16_t*>(out), narrow);
}

}  // namespace

std::size_t item_bytes(DType dtype) {
    switch (dtype) {
        case DType::float32: return 4;
        case DType::bfloat16: return 2;
        case DType::float64:
        case DType::int64: return 8;
    }
    throw std::logic_error("no such dtype");
}

void reduce(void* out, const std::vector<const void*>& terms, std::size_t count, DType dtype, Operation operation) {
    switch (dtype) {
        case DType::float32: return reduce_as<float>(out, terms, count, operation);
        case DType::float64: return reduce_as<double>(out, terms, count, operation);
        case DType::int64: return reduce_as<std::int64_t>(out, terms, count, operation);
        case DType::bfloat16: return reduce_bfloat16(out, terms, count, operation);
    }
}

}  // namespace host
