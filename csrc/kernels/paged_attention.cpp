#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

// Each entry is compiled for several instruction sets; the loader picks the best one that the processor has.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(KERNELS_NO_CLONES)
#define FOR_EACH_TARGET __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_TARGET
#endif
#define INLINE inline __attribute__((always_inline))

namespace kernels {
namespace {

struct BFloat16 {
    uint16_t bits;
};

template <class Stored>
struct Compute {
    using type = Stored;
};
template <>
struct Compute<BFloat16> {
    using type = float;
};

// PAGE numbers in which one can compute.
template <class C>
struct Lanes {
    typedef C type __attribute__((vector_size(PAGE * sizeof(C))));
};
typedef uint16_t Halves __attribute__((vector_size(PAGE * 2)));
typedef uint32_t Words __attribute__((vector_size(PAGE * 4)));
typedef int32_t Integers __attribute__((vector_size(PAGE * 4)));
using Floats = Lanes<float>::type;

template <class C>
INLINE void load(typename Lanes<C>::type& lanes, const C* from) {
    std::memcpy(&lanes, from, sizeof(lanes));
}
INLINE void load(Floats& lanes, const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&lanes, &words, sizeof(lanes));
}

template <class C>
INLINE C widened(C x) {
    return x;
}
INLINE float widened(BFloat16 x) {
    const uint32_t word = uint32_t{x.bits} << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof(wide));
    return wide;
}

template <class C>
INLINE void store(C* to, C x) {
    *to = x;
}
INLINE void store(BFloat16* to, float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof(word));
    // To the nearest, ties to even; a NaN must not be rounded up to infinity.
    to->bits = static_cast<uint16_t>(x != x ? 0x7FC0u : (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
}

// exp of PAGE numbers <= 0, to 2 units in the last place (Cephes' expf).
INLINE void exponentiate(float* x) {
    Floats v;
    load(v, x);
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
    p *= power;
    std::memcpy(x, &p, sizeof(p));
}
INLINE void exponentiate(double* x) {
    for (int i = 0; i < PAGE; ++i) x[i] = std::exp(x[i]);
}

template <class S>
INLINE void write_token(Shape shape, S* keys, S* values, int64_t place, const S* key, const S* value) {
    const int64_t page = place / PAGE, within = place % PAGE, dim = shape.head_dim;
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
        S* const block_keys = keys + (page * shape.kv_heads + head) * dim * PAGE;
        S* const block_values = values + (page * shape.kv_heads + head) * dim * PAGE;
        for (int64_t d = 0; d < dim; ++d) block_keys[d * PAGE + within] = key[head * dim + d];
        std::memcpy(block_values + within * dim, value + head * dim, static_cast<size_t>(dim) * sizeof(S));
    }
}

// The tokens [first, end) of one sequence under one kv head.
template <class S>
struct Span {
    const S* base;         // of the cache's keys or values, for this head
    const int32_t* pages;  // of the sequence
    int64_t page_elements;
    int64_t first, end;

    INLINE const S* page(int64_t index) const { return base + pages[index] * page_elements; }
    INLINE int64_t first_page() const { return first / PAGE; }
    INLINE int64_t pages_end() const { return (end + PAGE - 1) / PAGE; }
};

// scores[i] = scale * query . key of token first_page * PAGE + i; -inf outside of the span.
template <class S, class C>
INLINE void score(const Span<S>& span, const C* query, int64_t dim, C* scores) {
    for (int64_t index = span.first_page(); index < span.pages_end(); ++index) {
        const S* const block = span.page(index);
        typename Lanes<C>::type even = {}, odd = {}, lanes;
        int64_t d = 0;
        for (; d + 1 < dim; d += 2) {  // two sums, so that one does not wait for the other
            load(lanes, block + d * PAGE);
            even += query[d] * lanes;
            load(lanes, block + (d + 1) * PAGE);
            odd += query[d + 1] * lanes;
        }
        if (d < dim) {
            load(lanes, block + d * PAGE);
            even += query[d] * lanes;
        }
        even += odd;
        std::memcpy(scores + (index - span.first_page()) * PAGE, &even, sizeof(even));
    }
    const int64_t start = span.first_page() * PAGE;
    const C nothing = -std::numeric_limits<C>::infinity();
    for (int64_t token = start; token < span.first; ++token) scores[token - start] = nothing;
    for (int64_t token = span.end; token < span.pages_end() * PAGE; ++token) scores[token - start] = nothing;
}

// Turns scores into exp(score - largest), 0 outside of the span; returns their sum.
template <class S, class C>
INLINE C weigh(const Span<S>& span, C* scores) {
    using Vector = typename Lanes<C>::type;
    const int64_t start = span.first_page() * PAGE, count = span.pages_end() * PAGE - start;
    Vector largest, lanes, sum = {};
    load(largest, scores);
    for (int64_t i = PAGE; i < count; i += PAGE) {
        load(lanes, scores + i);
        largest = lanes > largest ? lanes : largest;
    }
    C top = largest[0];
    for (int i = 1; i < PAGE; ++i) top = std::max(top, largest[i]);
    for (int64_t i = 0; i < count; i += PAGE) {
        load(lanes, scores + i);
        lanes -= top;
        std::memcpy(scores + i, &lanes, sizeof(lanes));
        exponentiate(scores + i);
    }
    std::fill(scores, scores + (span.first - start), C{0});
    std::fill(scores + (span.end - start), scores + count, C{0});
    for (int64_t i = 0; i < count; i += PAGE) {
        load(lanes, scores + i);
        sum += lanes;
    }
    C total = 0;
    for (int i = 0; i < PAGE; ++i) total += sum[i];
    return total;
}

// out[0 : N * PAGE] = the sum over tokens of weight * value[0 : N * PAGE].
template <int N, class S, class C>
INLINE void mix_lanes(const Span<S>& span, const C* weights, C sum, int64_t dim, int64_t column, S* out) {
    typename Lanes<C>::type total[N] = {}, lanes;
    const int64_t start = span.first_page() * PAGE;
    for (int64_t index = span.first_page(); index < span.pages_end(); ++index) {
        const S* const block = span.page(index) + column;
        const int64_t from = std::max(span.first - index * PAGE, int64_t{0});
        const int64_t to = std::min(span.end - index * PAGE, int64_t{PAGE});
        for (int64_t t = from; t < to; ++t) {
            const C weight = weights[index * PAGE + t - start];
            for (int n = 0; n < N; ++n) {
                load(lanes, block + t * dim + n * PAGE);
                total[n] += weight * lanes;
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int i = 0; i < PAGE; ++i) store(out + n * PAGE + i, static_cast<C>(total[n][i] / sum));
}

template <class S, class C>
INLINE void mix(const Span<S>& span, const C* weights, C sum, int64_t dim, S* out) {
    int64_t column = 0;
    for (; column + 4 * PAGE <= dim; column += 4 * PAGE) mix_lanes<4>(span, weights, sum, dim, column, out + column);
    for (; column + PAGE <= dim; column += PAGE) mix_lanes<1>(span, weights, sum, dim, column, out + column);
    for (; column < dim; ++column) {
        C total = 0;
        for (int64_t token = span.first; token < span.end; ++token)
            total += weights[token - span.first_page() * PAGE] *
                     widened(span.page(token / PAGE)[token % PAGE * dim + column]);
        store(out + column, static_cast<C>(total / sum));
    }
}

template <class S>
INLINE void write_all(Shape shape, Cache cache, int64_t tokens, const int64_t* places, const void* key,
                      const void* value) {
    const int64_t width = shape.kv_heads * shape.head_dim;
    for (int64_t i = 0; i < tokens; ++i)
        write_token(shape, static_cast<S*>(cache.keys), static_cast<S*>(cache.values), places[i],
                    static_cast<const S*>(key) + i * width, static_cast<const S*>(value) + i * width);
}

template <class S>
INLINE void attend_all(Shape shape, Cache cache, Sequences sequences, const void* query, const void* key,
                       const void* value, double scale, int64_t window, void* out) {
    using C = typename Compute<S>::type;
    const int64_t dim = shape.head_dim, block = dim * PAGE, page_elements = shape.kv_heads * block;
    const int64_t width = shape.kv_heads * dim, heads = shape.kv_heads * shape.group;
    std::vector<C> scaled(static_cast<size_t>(dim));
    std::vector<C> scores(static_cast<size_t>(sequences.stride * PAGE));
    for (int64_t i = 0; i < sequences.count; ++i) {
        const int32_t* const pages = sequences.table + i * sequences.stride;
        const int64_t end = sequences.lengths[i] + 1;
        const int64_t first = window > 0 ? std::max(end - window, int64_t{0}) : 0;
        const int64_t place = pages[(end - 1) / PAGE] * int64_t{PAGE} + (end - 1) % PAGE;
        S* const keys = static_cast<S*>(cache.keys);
        S* const values = static_cast<S*>(cache.values);
        write_token(shape, keys, values, place, static_cast<const S*>(key) + i * width,
                    static_cast<const S*>(value) + i * width);
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t offset = head / shape.group * block;
            const S* const q = static_cast<const S*>(query) + (i * heads + head) * dim;
            for (int64_t d = 0; d < dim; ++d) scaled[d] = widened(q[d]) * static_cast<C>(scale);
            score(Span<S>{keys + offset, pages, page_elements, first, end}, scaled.data(), dim, scores.data());
            const Span<S> span{values + offset, pages, page_elements, first, end};
            const C sum = weigh(span, scores.data());
            mix(span, scores.data(), sum, dim, static_cast<S*>(out) + (i * heads + head) * dim);
        }
    }
}

// One entry a dtype, not a template: the clones of a function need a name of their own.
#define ENTRIES(S, NAME)                                                                                             \
    FOR_EACH_TARGET void write_##NAME(Shape shape, Cache cache, int64_t tokens, const int64_t* places,               \
                                      const void* key, const void* value) {                                          \
        write_all<S>(shape, cache, tokens, places, key, value);                                                      \
    }                                                                                                                \
    FOR_EACH_TARGET void attend_##NAME(Shape shape, Cache cache, Sequences sequences, const void* query,             \
                                       const void* key, const void* value, double scale, int64_t window, void* out) { \
        attend_all<S>(shape, cache, sequences, query, key, value, scale, window, out);                               \
    }
ENTRIES(float, float32)
ENTRIES(double, float64)
ENTRIES(BFloat16, bfloat16)

}  // namespace

void write(DType dtype, Shape shape, Cache cache, int64_t tokens, const int64_t* places, const void* key,
           const void* value) {
    switch (dtype) {
        case DType::float32: return write_float32(shape, cache, tokens, places, key, value);
        case DType::float64: return write_float64(shape, cache, tokens, places, key, value);
        case DType::bfloat16: return write_bfloat16(shape, cache, tokens, places, key, value);
    }
}

void attend(DType dtype, Shape shape, Cache cache, Sequences sequences, const void* query, const void* key,
            const void* value, double scale, int64_t window, void* out) {
    switch (dtype) {
        case DType::float32:
            return attend_float32(shape, cache, sequences, query, key, value, scale, window, out);
        case DType::float64:
            return attend_float64(shape, cache, sequences, query, key, value, scale, window, out);
        case DType::bfloat16:
            return attend_bfloat16(shape, cache, sequences, query, key, value, scale, window, out);
    }
}

}  // namespace kernels
