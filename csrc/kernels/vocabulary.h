// Distributions over the vocabulary, one a row of logits [rows, vocab]: statistics, gradients, draws; for the CPU.
//
// Logits are divided by `temperature` first, and computed with in float32; probabilities add up in float64.
// A given token outside of the vocabulary throws std::out_of_range, a uniform outside of [0, 1) std::invalid_argument.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace kernels {

// The logsumexp, the largest logit, the logit of `tokens`, and the mean logit unless `mean` is null; [rows] each.
void statistics(DType dtype, int64_t rows, int64_t vocab, const void* logits, float temperature,
                const int64_t* tokens, float* logsumexp, float* largest, float* picked, float* mean);

// Statistics of each row's distribution, whose vocabulary may be wider than the row; `entropy` is null if it has no
// gradient.
struct Distributions {
    const float *logsumexp, *entropy;
};

// The gradients of the log-probabilities and entropies of rows, and of the logit of the token: 0 if the token lies
// elsewhere.
struct Gradients {
    const float *logprob, *entropy, *at_token;
};

// The gradient [rows, vocab] of logits z, with p = exp(z / temperature - logsumexp): it is `at_token` at the token less
// p (logprob + entropy's (log p + entropy)), over the temperature.
void logprob_gradient(DType dtype, int64_t rows, int64_t vocab, const void* logits, float temperature,
                      const int64_t* tokens, const Distributions& of, const Gradients& grad, void* out);

// Inverts each row's cumulative distribution at `uniforms` [rows], in [0, 1): `tokens` get the first token whose
// upper border, the sum of the probabilities up to its own, is above; `logprobs` their log-probabilities. `margins` are
// by how much it missed the interval of the nearest other token that can be drawn, 1 where there is none.
// Without `uniforms` the tokens are given, and margins are 1.
// A row that is no distribution (a logit is NaN or infinite, or all are -infinity) gets the log-probability NaN.
void draw(DType dtype, int64_t rows, int64_t vocab, const void* logits, float temperature, const double* uniforms,
          int64_t* tokens, float* logprobs, double* margins);

}  // namespace kernels
