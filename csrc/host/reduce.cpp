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

Reduction::Reduction(void* out, std::size_t count, DType dtype, Operation operation)
    : out_(out), count_(count), dtype_(dtype), operation_(operation) {}

void Reduction::add(const void* term) {
    if (dtype_ == DType::bfloat16) {
        const auto* narrow_term = static_cast<const std::uint16_t*>(term);
        std::vector<float> wide(count_);
        std::transform(narrow_term, narrow_term + count_, wide.begin(), widen);
        if (is_first_)
            wide_.swap(wide);
        else
            combine(wide_.data(), wide.data(), count_, operation_);
    } else if (is_first_) {
        std::memcpy(out_, term, count_ * item_bytes(dtype_));
    } else if (dtype_ == DType::float32) {
        combine(static_cast<float*>(out_), static_cast<const float*>(term), count_, operation_);
    } else if (dtype_ == DType::float64) {
        combine(static_cast<double*>(out_), static_cast<const double*>(term), count_, operation_);
    } else {
        combine(static_cast<std::int64_t*>(out_), static_cast<const std::int64_t*>(term), count_, operation_);
    }
    is_first_ = false;
}

void Reduction::finish() {
    if (dtype_ != DType::bfloat16) return;
    std::transform(wide_.begin(), wide_.end(), static_cast<std::uint16_t*>(out_), narrow);
}

}  // namespace host
