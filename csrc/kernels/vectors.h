// Vectors of LANES numbers in which one can compute, and how numbers of each dtype come into them and out of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

// Each entry is compiled for several instruction sets; the loader picks the best one that the processor has. They are
// named by features, since GCC 11 cannot ask a processor for a level (x86-64-v3). Other architectures have one variant.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(KERNELS_NO_CLONES)
#define FOR_EACH_TARGET(...)                                 \
    __attribute__((target("avx512f"))) __VA_ARGS__           \
    __attribute__((target("avx2,fma,bmi,bmi2"))) __VA_ARGS__ \
    __attribute__((target("default"))) __VA_ARGS__
#else
#define FOR_EACH_TARGET(...) __VA_ARGS__
#endif
#define INLINE inline __attribute__((always_inline))
#define INLINE_CALL __attribute__((always_inline))  // for a lambda

// Defines NAME, whose first parameter is the `dtype`, by the template OF on the type of the numbers. The clones have a
// name of their own: GCC takes a call of a function with clones for one that never throws, and a caller from elsewhere
// would not be unwound.
#define ENTRY(RESULT, NAME, OF, PARAMETERS, ...)                                          \
    FOR_EACH_TARGET(RESULT OF##_clones PARAMETERS {                                       \
        switch (dtype) {                                                                  \
            case DType::float32: return OF<float>(__VA_ARGS__);                           \
            case DType::bfloat16: return OF<BFloat16>(__VA_ARGS__);                       \
            case DType::float64: break;                                                   \
        }                                                                                 \
        refuse();                                                                         \
    })                                                                                    \
    RESULT NAME PARAMETERS { return OF##_clones(dtype, __VA_ARGS__); }

namespace kernels {

enum class DType { float32, float64, bfloat16 };

[[noreturn]] inline void refuse() { throw std::invalid_argument("kernels: float32 or bfloat16 only"); }

constexpr int LANES = 16;

// Rows of numbers, `stride` elements from one to the next.
struct Matrix {
    void* data;
    int64_t stride;
};

struct BFloat16 {
    uint16_t bits;
};

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef double Doubles __attribute__((vector_size(LANES * 8)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));

// The type that computes with numbers stored as S.
template <class S>
struct Compute {
    using type = float;
    using Lanes = Floats;
};
template <>
struct Compute<double> {
    using type = double;
    using Lanes = Doubles;
};
template <class S>
using Lanes = typename Compute<S>::Lanes;

INLINE void load(Floats& lanes, const float* from) { std::memcpy(&lanes, from, sizeof(lanes)); }
INLINE void load(Doubles& lanes, const double* from) { std::memcpy(&lanes, from, sizeof(lanes)); }
INLINE void load(Floats& lanes, const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&lanes, &words, sizeof(lanes));
}

// To the nearest, ties to even; a NaN must not be rounded up to infinity.
INLINE Words rounded_words(const Floats& lanes) {
    Words words;
    std::memcpy(&words, &lanes, sizeof(words));
    const Words rounded = (words + 0x7FFFu + ((words >> 16) & 1u)) >> 16;
    // All ones in the lanes of a NaN. Not a comparison: with one, GCC 11 fails where this is inlined into a product.
    const Words is_nan = (Words)((0x7F800000 - (Integers)(words & 0x7FFFFFFFu)) >> 31);
    return (rounded & ~is_nan) | (0x7FC0u & is_nan);
}

INLINE void store(float* to, const Floats& lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }
INLINE void store(double* to, const Doubles& lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }
INLINE void store(BFloat16* to, const Floats& lanes) {
    const Halves halves = __builtin_convertvector(rounded_words(lanes), Halves);
    std::memcpy(to, &halves, sizeof(halves));
}

// Rounds numbers as a store and a load would.
template <class S>
INLINE void round_to(Lanes<S>& lanes) {
    if constexpr (sizeof(S) == sizeof(BFloat16)) {
        const Words words = rounded_words(lanes) << 16;
        std::memcpy(&lanes, &words, sizeof(lanes));
    }
}

// Where fewer than LANES numbers are left, `count` are loaded or stored; the other lanes are `rest` after a load.
template <class S>
INLINE void load(Lanes<S>& lanes, const S* from, int64_t count, typename Compute<S>::type rest = 0) {
    if (count >= LANES) return load(lanes, from);
    S all[LANES] = {};
    std::memcpy(all, from, static_cast<size_t>(count) * sizeof(S));
    Lanes<S> last;  // of its own: indices into `lanes` would keep them in memory
    load(last, all);
    for (int64_t i = count; i < LANES; ++i) last[i] = rest;
    lanes = last;
}
// Not for a function with a target of its own: clang refuses there what returns lanes.
template <class S>
INLINE Lanes<S> loaded(const S* from, int64_t count, typename Compute<S>::type rest = 0) {
    Lanes<S> lanes;
    load(lanes, from, count, rest);
    return lanes;
}
template <class S>
INLINE void store(S* to, const Lanes<S>& lanes, int64_t count) {
    if (count >= LANES) return store(to, lanes);
    S all[LANES];
    store(all, lanes);
    std::memcpy(to, all, static_cast<size_t>(count) * sizeof(S));
}

// Calls `step(place, count)` for every LANES numbers of a row, the last time perhaps for fewer.
template <class Step>
INLINE void for_lanes(int64_t width, const Step& step) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) step(i, int64_t{LANES});
    if (i < width) step(i, width - i);
}

template <class V>
INLINE auto sum(const V& lanes) {
    auto total = lanes[0];
    for (int i = 1; i < LANES; ++i) total += lanes[i];
    return total;
}
template <class V>
INLINE auto largest(const V& lanes) {
    auto most = lanes[0];
    for (int i = 1; i < LANES; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// exp of numbers <= 0, to 2 units in the last place (Cephes' expf); below -87 it is that of -87.
INLINE Floats exponential(Floats v) {
    v = v < -87.0f ? Floats{} - 87.0f : v;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (v * 1.44269504088896341f + shift) - shift;
    v = v - n * 0.693359375f - n * -2.12194440e-4f;
    Floats p = v * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * v + 8.3334519073e-3f;
    p = p * v + 4.1665795894e-2f;
    p = p * v + 1.6666665459e-1f;
    p = p * v + 5.0000001201e-1f;
    p = p * v * v + v + 1.0f;
    const Integers bits = (__builtin_convertvector(n, Integers) + 127) << 23;
    Floats power;
    std::memcpy(&power, &bits, sizeof(power));
    return p * power;
}

}  // namespace kernels
