#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace kernels {
namespace {

// Throws unless 0 <= number < end.
[[noreturn]] void refuse(const char* what, int64_t of, int64_t number, int64_t end) {
    throw std::out_of_range("kernels: " + std::string(what) + " " + std::to_string(of) + " is " +
                            std::to_string(number) + ", which is not from 0 to " + std::to_string(end - 1));
}
INLINE void check(const char* what, int64_t of, int64_t number, int64_t end) {
    if (number < 0 || number >= end) refuse(what, of, number, end);
}

INLINE Floats exponentials(const Floats& x) { return exponential(x); }
INLINE Doubles exponentials(Doubles x) {
    for (int i = 0; i < LANES; ++i) x[i] = std::exp(x[i]);
    return x;
}

INLINE float widened(BFloat16 x) {
    const uint32_t word = uint32_t{x.bits} << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof(wide));
    return wide;
}
template <class C>
INLINE C widened(C x) {
    return x;
}

// The pages of one layer, for all kv heads.
template <class S>
struct Pages {
    S *keys, *values;
    int64_t kv_heads, dim;

    INLINE int64_t block() const { return dim * PAGE; }  // elements of one head in a page
    INLINE S* keys_of(int64_t page) const { return keys + page * kv_heads * block(); }
    INLINE S* values_of(int64_t page) const { return values + page * kv_heads * block(); }

    INLINE void write(int64_t place, const S* key, const S* value) const {
        S* const page_keys = keys_of(place / PAGE) + place % PAGE;
        S* const page_values = values_of(place / PAGE) + place % PAGE * dim;
        for (int64_t head = 0; head < kv_heads; ++head) {
            for (int64_t d = 0; d < dim; ++d) page_keys[head * block() + d * PAGE] = key[head * dim + d];
            std::memcpy(page_values + head * block(), value + head * dim, static_cast<size_t>(dim) * sizeof(S));
        }
    }
};

// The tokens [first, end) of a sequence, whose pages are `pages`.
struct Span {
    const int32_t* pages;
    int64_t first, end;

    INLINE int64_t first_page() const { return first / PAGE; }
    INLINE int64_t pages_end() const { return (end + PAGE - 1) / PAGE; }
    INLINE int64_t start() const { return first_page() * PAGE; }  // the token of the first score
    INLINE int64_t scores() const { return pages_end() * PAGE - start(); }
};

// scores[0 : PAGE] = query . key of each token in a page, whose keys of one head are at `block`.
template <class S, class C>
INLINE void score(const S* block, const C* query, int64_t dim, C* scores) {
    Lanes<C> total[4] = {}, lanes;  // four sums, so that one does not wait for the others
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4)
        for (int i = 0; i < 4; ++i) {
            load(lanes, block + (d + i) * PAGE);
            total[i] += query[d + i] * lanes;
        }
    for (; d < dim; ++d) {
        load(lanes, block + d * PAGE);
        total[0] += query[d] * lanes;
    }
    store(scores, (total[0] + total[1]) + (total[2] + total[3]));
}

// Turns the scores of a span into exp(score - largest), 0 outside of the span; returns their sum.
template <class C>
INLINE C weigh(const Span& span, C* scores) {
    Lanes<C> most, lanes, total = {};
    const C nothing = -std::numeric_limits<C>::infinity();
    std::fill(scores, scores + (span.first - span.start()), nothing);
    std::fill(scores + (span.end - span.start()), scores + span.scores(), nothing);
    load(most, scores);
    for (int64_t i = LANES; i < span.scores(); i += LANES) {
        load(lanes, scores + i);
        most = lanes > most ? lanes : most;
    }
    const C top = largest(most);
    for (int64_t i = 0; i < span.scores(); i += LANES) {
        load(lanes, scores + i);
        store(scores + i, exponentials(lanes - top));
    }
    std::fill(scores, scores + (span.first - span.start()), C{0});
    std::fill(scores + (span.end - span.start()), scores + span.scores(), C{0});
    for (int64_t i = 0; i < span.scores(); i += LANES) {
        load(lanes, scores + i);
        total += lanes;
    }
    return sum(total);
}

// total[0 : N * LANES] += the sum over `count` tokens of weight * value[0 : N * LANES].
template <int N, class S, class C>
INLINE void mix_lanes(const S* block, const C* weights, int64_t count, int64_t dim, C* total) {
    Lanes<C> sums[N], lanes;
    for (int n = 0; n < N; ++n) load(sums[n], total + n * LANES);
    for (int64_t t = 0; t < count; ++t)
        for (int n = 0; n < N; ++n) {
            load(lanes, block + t * dim + n * LANES);
            sums[n] += weights[t] * lanes;
        }
    for (int n = 0; n < N; ++n) store(total + n * LANES, sums[n]);
}

// total[0 : dim] += the sum over `count` tokens of weight * value; the values of one head lie at `block`.
template <class S, class C>
INLINE void mix(const S* block, const C* weights, int64_t count, int64_t dim, C* total) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) mix_lanes<4>(block + d, weights, count, dim, total + d);
    for (; d + LANES <= dim; d += LANES) mix_lanes<1>(block + d, weights, count, dim, total + d);
    for (; d < dim; ++d)
        for (int64_t t = 0; t < count; ++t) total[d] += weights[t] * widened(block[t * dim + d]);
}

template <class S, class C>
INLINE void store_quotients(const C* numbers, C divisor, int64_t count, S* out) {
    for (int64_t i = 0; i < count; i += LANES) store(out + i, loaded(numbers + i, count - i) / divisor, count - i);
}

template <class S>
INLINE void write_all(Shape shape, Cache cache, int64_t tokens, const int64_t* places, Matrix key, Matrix value) {
    const Pages<S> pages{static_cast<S*>(cache.keys), static_cast<S*>(cache.values), shape.kv_heads, shape.head_dim};
    for (int64_t i = 0; i < tokens; ++i) {
        check("the place of token", i, places[i], cache.pages * PAGE);
        pages.write(places[i], static_cast<const S*>(key.data) + i * key.stride,
                    static_cast<const S*>(value.data) + i * value.stride);
    }
}

// Page by page, all heads of it: memory is read once, in long runs, and the next page is on its way meanwhile.
template <class S>
INLINE void attend_all(Shape shape, Cache cache, Sequences sequences, Matrix query, Matrix key, Matrix value, double scale,
                       int64_t window, void* out) {
    using C = typename Compute<S>::type;
    const int64_t dim = shape.head_dim, heads = shape.kv_heads * shape.group, width = sequences.stride * PAGE;
    const Pages<S> pages{static_cast<S*>(cache.keys), static_cast<S*>(cache.values), shape.kv_heads, dim};
    const int64_t block = pages.block();
    std::vector<C> scaled(static_cast<size_t>(heads * dim)), mixed(static_cast<size_t>(heads * dim));
    std::vector<C> scores(static_cast<size_t>(heads * width));  // a row for each head
    const auto span_of = [&](int64_t i) {
        const int64_t end = sequences.lengths[i] + 1;
        return Span{sequences.table + i * sequences.stride, window > 0 ? std::max(end - window, int64_t{0}) : 0, end};
    };
    for (int64_t i = 0; i < sequences.count; ++i) {
        check("the length of sequence", i, sequences.lengths[i], width);
        const Span span = span_of(i);
        for (int64_t p = span.first_page(); p < span.pages_end(); ++p)
            check("a page of sequence", i, span.pages[p], cache.pages);
        pages.write(span.pages[(span.end - 1) / PAGE] * int64_t{PAGE} + (span.end - 1) % PAGE,
                    static_cast<const S*>(key.data) + i * key.stride,
                    static_cast<const S*>(value.data) + i * value.stride);
        const S* const q = static_cast<const S*>(query.data) + i * query.stride;
        for (int64_t d = 0; d < heads * dim; ++d) scaled[d] = widened(q[d]) * static_cast<C>(scale);
        for (int64_t p = span.first_page(); p < span.pages_end(); ++p) {
            const S* const here = pages.keys_of(span.pages[p]);
            for (int64_t head = 0; head < heads; ++head) {
                const int64_t offset = head / shape.group * block;
                score(here + offset, &scaled[head * dim], dim, &scores[head * width + p * PAGE - span.start()]);
            }
        }
        std::fill(mixed.begin(), mixed.end(), C{0});
        S* const result = static_cast<S*>(out) + i * heads * dim;
        std::vector<C>& sums = scaled;  // the query is used up
        for (int64_t head = 0; head < heads; ++head) sums[head] = weigh(span, &scores[head * width]);
        for (int64_t p = span.first_page(); p < span.pages_end(); ++p) {
            const S* const here = pages.values_of(span.pages[p]);
            const int64_t from = std::max(span.first - p * PAGE, int64_t{0});
            const int64_t to = std::min(span.end - p * PAGE, int64_t{PAGE});
            for (int64_t head = 0; head < heads; ++head) {
                const int64_t offset = head / shape.group * block;
                mix(here + offset + from * dim, &scores[head * width + p * PAGE + from - span.start()], to - from, dim,
                    &mixed[head * dim]);
            }
        }
        for (int64_t head = 0; head < heads; ++head)
            store_quotients(&mixed[head * dim], sums[head], dim, result + head * dim);
    }
}

}  // namespace

// With clones of another name: see `ENTRY`.
FOR_EACH_TARGET(void write_clones(DType dtype, Shape shape, Cache cache, int64_t tokens, const int64_t* places,
                                  Matrix key, Matrix value) {
    switch (dtype) {
        case DType::float32: return write_all<float>(shape, cache, tokens, places, key, value);
        case DType::float64: return write_all<double>(shape, cache, tokens, places, key, value);
        case DType::bfloat16: return write_all<BFloat16>(shape, cache, tokens, places, key, value);
    }
})
FOR_EACH_TARGET(void attend_clones(DType dtype, Shape shape, Cache cache, Sequences sequences, Matrix query, Matrix key,
                                   Matrix value, double scale, int64_t window, void* out) {
    switch (dtype) {
        case DType::float32:
            return attend_all<float>(shape, cache, sequences, query, key, value, scale, window, out);
        case DType::float64:
            return attend_all<double>(shape, cache, sequences, query, key, value, scale, window, out);
        case DType::bfloat16:
            return attend_all<BFloat16>(shape, cache, sequences, query, key, value, scale, window, out);
    }
})

void write(DType dtype, Shape shape, Cache cache, int64_t tokens, const int64_t* places, Matrix key, Matrix value) {
    write_clones(dtype, shape, cache, tokens, places, key, value);
}

void attend(DType dtype, Shape shape, Cache cache, Sequences sequences, Matrix query, Matrix key, Matrix value,
            double scale, int64_t window, void* out) {
    attend_clones(dtype, shape, cache, sequences, query, key, value, scale, window, out);
}

}  // namespace kernels
