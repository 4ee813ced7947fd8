#include "layers.h"

#include <cmath>

namespace kernels {
namespace {

// 1 / sqrt(mean(x^2) + epsilon)
template <class S>
INLINE float inverse_rms(const S* from, int64_t width, float epsilon) {
    Floats even = {}, odd = {};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        const Floats a = loaded(from + d, LANES), b = loaded(from + d + LANES, LANES);
        even += a * a;
        odd += b * b;
    }
    for (; d < width; d += LANES) {
        const Floats a = loaded(from + d, width - d);
        even += a * a;
    }
    return 1.0f / std::sqrt(sum(even + odd) / static_cast<float>(width) + epsilon);
}

template <class S>
INLINE void rms_norm_rows(int64_t rows, int64_t width, Matrix x, const void* weight, float epsilon, Matrix out) {
    const S* const w = static_cast<const S*>(weight);
    for (int64_t i = 0; i < rows; ++i) {
        const S* const from = static_cast<const S*>(x.data) + i * x.stride;
        S* const to = static_cast<S*>(out.data) + i * out.stride;
        const float scale = inverse_rms(from, width, epsilon);
        for_lanes(width, [&](int64_t d, int64_t count) INLINE_CALL {
            Floats normalised = loaded(from + d, count) * scale;
            round_to<S>(normalised);
            store(to + d, loaded(w + d, count) * normalised, count);
        });
    }
}

// With s = 1 / rms(x): d/dx = s (weight grad - x s^2 mean(weight grad x)), d/dweight = the sum over rows of grad x s.
template <class S>
INLINE void rms_norm_gradient_rows(int64_t rows, int64_t width, Matrix x, const void* weight, float epsilon,
                                   Matrix grad, Matrix grad_x, double* grad_weight) {
    const S* const w = static_cast<const S*>(weight);
    for (int64_t d = 0; d < width; ++d) grad_weight[d] = 0;
    for (int64_t i = 0; i < rows; ++i) {
        const S* const from = static_cast<const S*>(x.data) + i * x.stride;
        const S* const g = static_cast<const S*>(grad.data) + i * grad.stride;
        S* const to = static_cast<S*>(grad_x.data) + i * grad_x.stride;
        const float scale = inverse_rms(from, width, epsilon);
        Floats dot = {};
        for_lanes(width, [&](int64_t d, int64_t count) INLINE_CALL {
            const Floats along = loaded(g + d, count) * loaded(from + d, count);
            dot += loaded(w + d, count) * along;
            const Doubles of_weight = __builtin_convertvector(along * scale, Doubles);
            if (count == LANES) {
                Doubles total;
                load(total, grad_weight + d);
                store(grad_weight + d, total + of_weight);
            } else {
                for (int64_t lane = 0; lane < count; ++lane) grad_weight[d + lane] += of_weight[lane];
            }
        });
        const float back = scale * scale * sum(dot) / static_cast<float>(width);
        for_lanes(width, [&](int64_t d, int64_t count) INLINE_CALL {
            store(to + d, scale * (loaded(w + d, count) * loaded(g + d, count) - back * loaded(from + d, count)), count);
        });
    }
}

template <class S>
INLINE void rotate_rows(int64_t rows, int64_t heads, int64_t head_dim, Matrix x, const void* cosine, const void* sine,
                        Matrix out) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < rows; ++i) {
        const S* const cosines = static_cast<const S*>(cosine) + i * head_dim;
        const S* const sines = static_cast<const S*>(sine) + i * head_dim;
        for (int64_t head = 0; head < heads; ++head) {
            const S* const from = static_cast<const S*>(x.data) + i * x.stride + head * head_dim;
            S* const to = static_cast<S*>(out.data) + i * out.stride + head * head_dim;
            for_lanes(half, [&](int64_t d, int64_t count) INLINE_CALL {
                const Floats a = loaded(from + d, count), b = loaded(from + half + d, count);
                Floats turned_a = a * loaded(cosines + d, count), turned_b = b * loaded(cosines + half + d, count);
                round_to<S>(turned_a);
                round_to<S>(turned_b);
                store(to + d, turned_a - b * loaded(sines + d, count), count);
                store(to + half + d, turned_b + a * loaded(sines + half + d, count), count);
            });
        }
    }
}

// 1 / (1 + exp(-x)), by exponentials of numbers that are not positive.
INLINE Floats sigmoid(const Floats& x) {
    const Floats e = exponential(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e);
}

template <class S>
INLINE void gated_silu_rows(int64_t rows, int64_t width, Matrix gate, Matrix up, Matrix out) {
    for (int64_t i = 0; i < rows; ++i) {
        const S* const g = static_cast<const S*>(gate.data) + i * gate.stride;
        const S* const u = static_cast<const S*>(up.data) + i * up.stride;
        S* const to = static_cast<S*>(out.data) + i * out.stride;
        for_lanes(width, [&](int64_t d, int64_t count) INLINE_CALL {
            const Floats x = loaded(g + d, count);
            Floats activated = x * sigmoid(x);
            round_to<S>(activated);
            store(to + d, activated * loaded(u + d, count), count);
        });
    }
}

// silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))
template <class S>
INLINE void gated_silu_gradient_rows(int64_t rows, int64_t width, Matrix gate, Matrix up, Matrix grad, Matrix grad_gate,
                                     Matrix grad_up) {
    for (int64_t i = 0; i < rows; ++i) {
        const S* const a = static_cast<const S*>(gate.data) + i * gate.stride;
        const S* const u = static_cast<const S*>(up.data) + i * up.stride;
        const S* const g = static_cast<const S*>(grad.data) + i * grad.stride;
        S* const to_gate = static_cast<S*>(grad_gate.data) + i * grad_gate.stride;
        S* const to_up = static_cast<S*>(grad_up.data) + i * grad_up.stride;
        for_lanes(width, [&](int64_t d, int64_t count) INLINE_CALL {
            const Floats x = loaded(a + d, count), of_x = sigmoid(x), given = loaded(g + d, count);
            store(to_up + d, given * x * of_x, count);
            store(to_gate + d, given * loaded(u + d, count) * of_x * (1.0f + x * (1.0f - of_x)), count);
        });
    }
}

template <class S>
INLINE void add_tree_of(int64_t leaves, int64_t count, const void* vectors, void* to) {
    constexpr int64_t MOST = 8;
    if (leaves < 1 || leaves > MOST) throw std::invalid_argument("kernels: a tree of 1 to 8 vectors");
    const S* const from = static_cast<const S*>(vectors);
    S* const total = static_cast<S*>(to);
    for_lanes(count, [&](int64_t i, int64_t lanes) INLINE_CALL {
        Floats sums[MOST];
        for (int64_t leaf = 0; leaf < leaves; ++leaf) sums[leaf] = loaded(from + leaf * count + i, lanes);
        int64_t left = leaves;
        for (; left > 1 && left % 2 == 0; left /= 2)
            for (int64_t pair = 0; pair < left / 2; ++pair) sums[pair] = sums[2 * pair] + sums[2 * pair + 1];
        for (int64_t leaf = 1; leaf < left; ++leaf) sums[0] += sums[leaf];
        round_to<S>(sums[0]);
        store(total + i, loaded(total + i, lanes) + sums[0], lanes);
    });
}

template <class S>
INLINE double square_sum_of(int64_t count, const void* numbers) {
    const S* const from = static_cast<const S*>(numbers);
    Doubles even = {}, odd = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const Doubles a = __builtin_convertvector(loaded(from + i, LANES), Doubles);
        const Doubles b = __builtin_convertvector(loaded(from + i + LANES, LANES), Doubles);
        even += a * a;
        odd += b * b;
    }
    for (; i < count; i += LANES) {
        const Doubles a = __builtin_convertvector(loaded(from + i, count - i), Doubles);
        even += a * a;
    }
    return sum(even + odd);
}

}  // namespace

ENTRY(void, rms_norm, rms_norm_rows,
      (DType dtype, int64_t rows, int64_t width, Matrix x, const void* weight, float epsilon, Matrix out),
      rows, width, x, weight, epsilon, out)
ENTRY(void, rotate, rotate_rows,
      (DType dtype, int64_t rows, int64_t heads, int64_t head_dim, Matrix x, const void* cosine, const void* sine,
       Matrix out),
      rows, heads, head_dim, x, cosine, sine, out)
ENTRY(void, gated_silu, gated_silu_rows,
      (DType dtype, int64_t rows, int64_t width, Matrix gate, Matrix up, Matrix out), rows, width, gate, up, out)
ENTRY(void, rms_norm_gradient, rms_norm_gradient_rows,
      (DType dtype, int64_t rows, int64_t width, Matrix x, const void* weight, float epsilon, Matrix grad,
       Matrix grad_x, double* grad_weight),
      rows, width, x, weight, epsilon, grad, grad_x, grad_weight)
ENTRY(void, gated_silu_gradient, gated_silu_gradient_rows,
      (DType dtype, int64_t rows, int64_t width, Matrix gate, Matrix up, Matrix grad, Matrix grad_gate, Matrix grad_up),
      rows, width, gate, up, grad, grad_gate, grad_up)
ENTRY(void, add_tree, add_tree_of, (DType dtype, int64_t leaves, int64_t count, const void* vectors, void* to), leaves,
      count, vectors, to)
ENTRY(double, square_sum, square_sum_of, (DType dtype, int64_t count, const void* numbers), count, numbers)

}  // namespace kernels
