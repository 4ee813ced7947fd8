#include "vocabulary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace kernels {
namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// A row of logits / temperature.
template <class S>
struct Row {
    const S* logits;
    int64_t vocab;
    float temperature;

    // Those of LANES tokens from `first` on; behind the last token there is nothing.
    INLINE Floats lanes(int64_t first) const {
        const Floats z = loaded(logits + first, vocab - first, NOTHING);
        return temperature == 1.0f ? z : z / temperature;
    }
    INLINE float of(int64_t token) const {
        const float z = loaded(logits + token, 1)[0];
        return temperature == 1.0f ? z : z / temperature;
    }
};

[[noreturn]] void refuse_token(int64_t row, int64_t token, int64_t vocab) {
    throw std::out_of_range("kernels: token " + std::to_string(token) + " of row " + std::to_string(row) +
                            " is not from 0 to " + std::to_string(vocab - 1));
}

// `tokens[row]`, which comes from outside.
INLINE int64_t checked(const int64_t* tokens, int64_t row, int64_t vocab) {
    if (tokens[row] < 0 || tokens[row] >= vocab) refuse_token(row, tokens[row], vocab);
    return tokens[row];
}

// softmax(z) = exp(z - largest - log_total)
struct Normaliser {
    float largest, log_total;

    // False where a logit is NaN or infinite, or all are -infinity.
    INLINE bool is_distribution() const { return std::isfinite(largest + log_total); }

    INLINE Floats probabilities(const Floats& z) const {
        return z == NOTHING ? Floats{} : exponential((z - largest) - log_total);
    }
    INLINE float logprob(float z) const { return (z - largest) - log_total; }
};

template <class S>
INLINE Normaliser normaliser(const Row<S>& row) {
    Floats most = Floats{} + NOTHING, total = {};
    for (int64_t i = 0; i < row.vocab; i += LANES) {
        const Floats z = row.lanes(i);
        most = z > most ? z : most;
    }
    const Normaliser unscaled{largest(most), 0.0f};
    for (int64_t i = 0; i < row.vocab; i += LANES) total += unscaled.probabilities(row.lanes(i));
    return {unscaled.largest, std::log(sum(total))};
}

template <class S>
INLINE void statistics_of_rows(int64_t rows, int64_t vocab, const void* logits, float temperature,
                               const int64_t* tokens, float* logsumexp, float* largest, float* picked, float* mean) {
    for (int64_t i = 0; i < rows; ++i) {
        const Row<S> row{static_cast<const S*>(logits) + i * vocab, vocab, temperature};
        const Normaliser found = normaliser(row);
        logsumexp[i] = found.largest + found.log_total;
        largest[i] = found.largest;
        picked[i] = row.of(checked(tokens, i, vocab));
        if (!mean) continue;
        Floats total = {};
        for (int64_t j = 0; j < vocab; j += LANES) {
            const Floats z = row.lanes(j);
            total += found.probabilities(z) * (z == NOTHING ? Floats{} : z);
        }
        mean[i] = sum(total);
    }
}

template <class S>
INLINE void logprob_gradient_of_rows(int64_t rows, int64_t vocab, const void* logits, float temperature,
                                     const int64_t* tokens, const Distributions& of, const Gradients& grad, void* out) {
    for (int64_t i = 0; i < rows; ++i) {
        const Row<S> row{static_cast<const S*>(logits) + i * vocab, vocab, temperature};
        S* const to = static_cast<S*>(out) + i * vocab;
        const int64_t token = checked(tokens, i, vocab);
        const float along = grad.logprob[i], entropy = of.entropy ? of.entropy[i] : 0.0f;
        const float of_entropy = of.entropy ? grad.entropy[i] : 0.0f;
        const Normaliser normaliser{of.logsumexp[i], 0.0f};
        const auto gradient = [&](const Floats& z) INLINE_CALL {
            const Floats p = normaliser.probabilities(z);
            if (of_entropy == 0.0f) return -along * p;
            return p == 0.0f ? Floats{} : -p * (along + of_entropy * ((z - of.logsumexp[i]) + entropy));
        };
        for_lanes(vocab, [&](int64_t j, int64_t count) INLINE_CALL {
            store(to + j, gradient(row.lanes(j)) / temperature, count);
        });
        const Floats at_token = gradient(Floats{} + row.of(token)) + grad.at_token[i];
        store(to + token, at_token / temperature, 1);
    }
}

struct Place {
    int64_t token;
    double margin;
};

// The borders of all tokens would be a chain of additions: there are only those of blocks of LANES tokens, each one the
// border before plus the sum within the block. `probabilities` and `borders` are room for them.
template <class S>
INLINE Place invert(const Row<S>& row, const Normaliser& found, double uniform, std::vector<float>& probabilities,
                    std::vector<double>& borders) {
    double total = 0;
    for (size_t block = 0; block < borders.size(); ++block) {
        float* const of_block = &probabilities[block * LANES];
        store(of_block, found.probabilities(row.lanes(static_cast<int64_t>(block) * LANES)));
        double within = 0;
        for (int i = 0; i < LANES; ++i) within += static_cast<double>(of_block[i]);
        borders[block] = total += within;
    }
    // Rounding may lift the product to the total, which lies beyond the last interval.
    const double point = std::min(uniform * total, std::nextafter(total, 0.0));
    const auto block = std::upper_bound(borders.begin(), borders.end(), point) - borders.begin();
    const double base = block ? borders[static_cast<size_t>(block) - 1] : 0.0;
    const float* const of_block = &probabilities[static_cast<size_t>(block) * LANES];
    int i = 0;
    double before = 0, within = of_block[0];
    while (base + within <= point) {
        before = within;
        within += static_cast<double>(of_block[++i]);
    }
    const double lower = base + before, upper = base + within;
    // 0 and the total border no other token, so that no rounding moves a draw across them.
    const double margin = std::min(lower > 0 ? point - lower : 1.0, upper < total ? upper - point : 1.0);
    return {block * LANES + i, margin};
}

template <class S>
INLINE void draw_rows(int64_t rows, int64_t vocab, const void* logits, float temperature, const double* uniforms,
                      int64_t* tokens, float* logprobs, double* margins) {
    const size_t blocks = static_cast<size_t>((vocab + LANES - 1) / LANES);
    std::vector<float> probabilities(blocks * LANES);
    std::vector<double> borders(blocks);
    for (int64_t i = 0; i < rows; ++i) {
        const Row<S> row{static_cast<const S*>(logits) + i * vocab, vocab, temperature};
        const Normaliser found = normaliser(row);
        if (!uniforms) {
            tokens[i] = checked(tokens, i, vocab);
        } else if (!(uniforms[i] >= 0 && uniforms[i] < 1)) {
            throw std::invalid_argument("kernels: the random number of row " + std::to_string(i) + " is " +
                                        std::to_string(uniforms[i]) + ", not in [0, 1)");
        }
        if (!found.is_distribution()) {
            if (uniforms) tokens[i] = 0;
            logprobs[i] = std::numeric_limits<float>::quiet_NaN();
            margins[i] = 0;
            continue;
        }
        const Place place =
            uniforms ? invert(row, found, uniforms[i], probabilities, borders) : Place{tokens[i], 1.0};
        tokens[i] = place.token;
        logprobs[i] = found.logprob(row.of(place.token));
        margins[i] = place.margin;
    }
}

}  // namespace

ENTRY(void, statistics, statistics_of_rows,
      (DType dtype, int64_t rows, int64_t vocab, const void* logits, float temperature, const int64_t* tokens,
       float* logsumexp, float* largest, float* picked, float* mean),
      rows, vocab, logits, temperature, tokens, logsumexp, largest, picked, mean)
ENTRY(void, logprob_gradient, logprob_gradient_of_rows,
      (DType dtype, int64_t rows, int64_t vocab, const void* logits, float temperature, const int64_t* tokens,
       const Distributions& of, const Gradients& grad, void* out),
      rows, vocab, logits, temperature, tokens, of, grad, out)
ENTRY(void, draw, draw_rows,
      (DType dtype, int64_t rows, int64_t vocab, const void* logits, float temperature, const double* uniforms,
       int64_t* tokens, float* logprobs, double* margins),
      rows, vocab, logits, temperature, uniforms, tokens, logprobs, margins)

}  // namespace kernels
