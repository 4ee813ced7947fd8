"""The mathematics of the algorithms: functions of tensors, without side effects and without a model.

Packed tensors hold the response tokens of all samples end to end, `[responses]` in the shape
comments; a response's token j is predicted by the state before it, which is the position of the
token before it in the sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.parallel.vocabulary import Logits, TokenLogprobs, WholeLogits


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged in float64."""
    return x if x.dtype == torch.float64 else x.float()


def predicting_positions(lengths: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> Tensor:
    """The positions in packed sequences of the states that predict response tokens.

    Args:
        lengths: tokens of each sequence, prompt and response.
        prompt_lengths: tokens of each prompt, at least 1.

    Returns:
        [responses] int64: indices p into the packed tokens; `tokens[p + 1]` is the response token
        that the model's output at p predicts.
    """
    positions, start = [], 0
    for length, prompt_length in zip(lengths, prompt_lengths, strict=True):
        assert 1 <= prompt_length <= length, f"a prompt of {prompt_length} tokens in a sequence of {length}"
        positions.append(torch.arange(start + prompt_length - 1, start + length - 1, device=device))
        start += length
    return torch.cat(positions)


def last_positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[batch] int64: index of each sequence's last token in the packed tokens."""
    return torch.tensor(lengths, device=device).cumsum(0) - 1


def token_statistics(
    logits: Tensor | Logits | WholeLogits, tokens: Tensor, temperature: float = 1.0, *, with_entropy: bool = False
) -> TokenLogprobs:
    """Log-probability of `tokens` [n], whether each is the most likely one, and on demand the entropy.

    Args:
        logits: [n, vocab]; the logits of a model's head are never all in memory.
    """
    if isinstance(logits, Tensor):
        logits = WholeLogits(logits)
    return logits.of_tokens(tokens, temperature, with_entropy=with_entropy)


def token_logprobs(logits: Tensor | Logits | WholeLogits, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens` [n], in at least float32: [n]; see `token_statistics`."""
    return token_statistics(logits, tokens, temperature).logprob


def cross_entropy(logits: Tensor | Logits | WholeLogits, tokens: Tensor) -> Tensor:
    """-log softmax(logits) at `tokens`, [n], in at least float32; not reduced."""
    return -token_logprobs(logits, tokens)


def kl_k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Per token log p - log q, where the tokens were drawn from p: unbiased for KL(p || q), may be negative."""
    return logprob - ref_logprob


def kl_k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Per token r - 1 - log r with r = q / p, tokens drawn from p: unbiased for KL(p || q), never negative.

    Source: J. Schulman, "Approximating KL Divergence" (2020); the estimate that GRPO uses.
    """
    log_ratio = ref_logprob - logprob
    return log_ratio.exp() - 1 - log_ratio


def standardised_score(score: Tensor, mean: float, std: float, clip: float) -> Tensor:
    """(score - mean) / std, clipped to [-clip, clip]."""
    return ((score - mean) / std).clamp(-clip, clip)


def kl_penalised_rewards(score: Tensor, logprob: Tensor, ref_logprob: Tensor, kl_coef: float) -> Tensor:
    """The reward of every token of one response.

        r_j = -kl_coef * (logprob_j - ref_logprob_j), plus `score` at the last token.

    Args:
        score: [1], of the whole response.
        logprob, ref_logprob: [response], of the drawn tokens under the policy that drew them and under the reference.

    Returns:
        [response].

    Source: Ouyang et al., "Training language models to follow instructions" (2022), section 3.5.
    """
    rewards = -kl_coef * kl_k1(logprob, ref_logprob)
    rewards[-1] += score[0]
    return rewards


def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], gamma: float, lam: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimates of a batch of responses.

        delta_j = r_j + gamma * V_{j+1} - V_j
        A_j     = delta_j + gamma * lam * A_{j+1}

    with V = A = 0 after the last token: a response that was cut off at the maximum length counts as ended.

    Args:
        rewards: per sample [response].
        values: per sample [response]; values[j] is that of the state that predicts token j.

    Returns:
        (advantages, returns), each per sample [response]; returns = advantages + values.

    Source: Schulman et al., "High-dimensional continuous control using GAE" (2016), equation 16.
    """
    lengths = [len(r) for r in rewards]
    # Zeros after the end give delta = A = 0 there, so padding needs no mask.
    r = torch.nn.utils.rnn.pad_sequence(list(rewards), batch_first=True)  # [batch, longest]
    v = torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)
    v_next = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)
    delta = r + gamma * v_next - v
    advantage = discounted_sums(delta, gamma * lam)
    advantages = [row[:n] for row, n in zip(advantage, lengths, strict=True)]
    return advantages, [a + value for a, value in zip(advantages, values, strict=True)]


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """y[:, j] = sum over k >= j of discount^(k - j) x[:, k], for `x` [batch, length].

    It doubles the summed span each time (Hillis and Steele, 1986); a loop over columns would launch kernels for each
    token of the longest response. All operations are elementwise, so a row's bits depend neither on other rows nor on
    the zeros after its end.
    """
    sums, span = x.clone(), 1  # each sum has `span` columns
    while span < x.shape[1]:
        sums[:, :-span] = sums[:, :-span] + discount**span * sums[:, span:]
        span *= 2
    return sums


def moments(x: Tensor) -> Tensor:
    """[3] float64: sum, sum of squares, count; moments of several ranks can be added."""
    x = x.double()
    return torch.stack([x.sum(), x.square().sum(), torch.full_like(x.sum(), x.numel())])


def mean_and_variance(moments_: Tensor) -> tuple[float, float]:
    """Mean and (biased) variance from `moments`."""
    total, square, count = moments_.tolist()
    mean = total / count
    return mean, max(square / count - mean * mean, 0.0)


def whiten(x: Tensor, moments_: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps), with the moments of the whole batch, of which `x` may be a part."""
    mean, variance = mean_and_variance(moments_)
    return (x - mean) * (variance + eps) ** -0.5


def ppo_policy_loss(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, per token and not reduced.

        ratio = exp(logprob - old_logprob)
        L     = max(-ratio * A, -clamp(ratio, 1 - clip, 1 + clip) * A)

    Args:
        logprob: [responses] with gradient; old_logprob, advantage: [responses].

    Returns:
        (L [responses], is_clipped [responses]: True if clipping removed the gradient).

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017), equation 7.
    """
    ratio = (logprob - old_logprob).exp()
    free = -ratio * advantage
    clipped = -ratio.clamp(1 - clip, 1 + clip) * advantage
    return torch.maximum(free, clipped), clipped > free


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error per token, with the value kept within `clip` of the old value.

        L = 1/2 max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2)

    Returns:
        (L [responses], is_clipped [responses]).
    """
    free = (value - returns).square()
    clipped = (torch.minimum(torch.maximum(value, old_value - clip), old_value + clip) - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free


def pairwise_loss(chosen: Tensor, rejected: Tensor, score_square_coef: float = 0.0) -> Tensor:
    """The Bradley-Terry loss of each pair, with a pull of the scores towards 0.

        L = -log sigmoid(s_chosen - s_rejected) + c * (s_chosen^2 + s_rejected^2)

    Args:
        chosen, rejected: scores [pairs].

    Returns:
        [pairs].
    """
    margin = at_least_fp32(chosen) - at_least_fp32(rejected)
    return -torch.nn.functional.logsigmoid(margin) + score_square_coef * (chosen.square() + rejected.square())
