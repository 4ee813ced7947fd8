"""What functions of rollouts share: the samples that count, their groups, their corrections and their statistics."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from realhf.algorithms.choices import KLEstimator
from realhf.algorithms.functional import importance_weights, is_informative, kl_k1, kl_penalised_rewards
from realhf.algorithms.options import PolicyOptions
from realhf.algorithms.statistics import mean_of
from realhf.algorithms.stop_strings import is_stopped
from realhf.api.script.columns import Columns
from realhf.base.errors import UserError
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats
from realhf.engine.returned import InterfaceError


def responses(rollout: Columns) -> list[Tensor]:
    """The tokens of each response."""
    return [seq[len(prompt) :] for prompt, seq in zip(rollout.prompt, rollout.seq, strict=True)]


def lengths_of(column: Sequence[Tensor]) -> Tensor:
    """[batch] int64: how many tokens each sample has."""
    return torch.tensor([len(x) for x in column], device=column[0].device)


def validity(columns: Columns) -> Tensor:
    """[batch] bool: whether a sample counts; all do where there is no column `valid`."""
    valid = columns.get("valid")
    if valid is None:
        return torch.ones(len(columns), dtype=torch.bool)
    return of_responses("valid", valid, columns.ids).cpu() > 0


def rewards_of(scores: Columns, rollout: Columns | None, key: str = "reward") -> list[Tensor]:
    """Per sample the column `reward` in float64: [1], the reward of the whole response, or [response], those of its
    tokens. `key` names it in errors; without the `rollout` of the scores any length is taken for that of the response.

    Raises:
        InterfaceError: a sample has another shape; the text names key, sample, both lengths and remedy.
    """
    lengths = [len(column) for column in (scores.reward if rollout is None else rollout.logprob)]
    for sample, value, length in zip(scores.ids, scores.reward, lengths, strict=True):
        if value.dim() != 1 or len(value) not in (1, length):
            raise InterfaceError(
                f"{key!r} of sample {sample} has the shape {list(value.shape)}, and its response {length} tokens; give "
                f"[1], the reward of the whole response, or [{length}], one for each of its tokens (the end token too)"
            )
    return list(torch.cat(list(scores.reward)).double().split([len(value) for value in scores.reward]))


def sums_of(rewards: Sequence[Tensor]) -> Tensor:
    """[batch]: one number a response, the sum over its tokens where these have rewards of their own."""
    if all(len(reward) == 1 for reward in rewards):  # in one kernel
        return torch.cat(list(rewards))
    # Copies: torch's kernel for GPUs may choose the order of a sum by where in memory its terms begin.
    return torch.stack([reward.clone().sum() for reward in rewards])


def of_responses(key: str, column: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
    """[batch]: a column that has one number, [1], for each sample.

    Raises:
        InterfaceError: a sample has another shape; the text names key, sample, shape and remedy.
    """
    for sample, value in zip(ids, column, strict=True):
        if value.shape != (1,):
            raise InterfaceError(
                f"{key!r} of sample {sample} has the shape {list(value.shape)}, must be [1]: one number for the whole "
                "response; add up what its tokens have (.sum().view(1)), or give them under another key to a tensor "
                "function of your own"
            )
    return torch.cat(list(column))


def penalised_rewards(
    scores: Sequence[Tensor], rollout: Columns, ref: Columns | None, kl_coef: float, estimator: KLEstimator
) -> list[Tensor]:
    """The rewards of the tokens, per sample [response] float64, from `scores` [1] or [response] a sample; see
    `kl_penalised_rewards`. There is no penalty where there is no reference."""
    reference = rollout.logprob if ref is None else ref.ref_logprob
    rows = zip(scores, rollout.logprob, reference, strict=True)
    return [kl_penalised_rewards(score, p, q, kl_coef, estimator) for score, p, q in rows]


def counted(columns: Sequence[Tensor], is_valid: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The columns in `dtype`, 0 where a sample does not count."""
    pairs = zip(columns, is_valid.tolist(), strict=True)
    return [(column if valid else torch.zeros_like(column)).to(dtype) for column, valid in pairs]


def drawn_by(batch: Batch) -> Tensor:
    """[responses]: log-probabilities of the policy that training began with, of which the ratios are taken.

    They are `old_logprob` where a call computed them again, else those of the generation.
    """
    return batch.packed("old_logprob" if "old_logprob" in batch.data else "logprob").values


def in_groups(context: Context, ids: Sequence[int], values: Tensor, is_valid: Tensor) -> tuple[Tensor, Tensor]:
    """One number a sample, of all samples of the step, as (values, is_valid): [groups, G] each.

    Args:
        ids: of this rank's samples; values [len(ids)]; is_valid [len(ids)] bool. What is not valid counts as 0.
    """
    is_valid = is_valid.to(values.device)
    columns = torch.stack([torch.where(is_valid, values, 0.0), is_valid.to(values.dtype)], 1)
    ordered = context.in_order(ids, columns).view(-1, context.samples_per_prompt, 2)
    return ordered[..., 0], ordered[..., 1] > 0


def informative_share(rewards: Tensor, is_valid: Tensor) -> Stats:
    """`informative_groups`: the share of the groups whose rewards differ; `rewards`, `is_valid` [groups, G]."""
    informative = is_informative(rewards, is_valid)
    return {"informative_groups": (float(informative.sum()), float(len(informative)))}


def of_ids(grouped: Tensor, ids: Sequence[int]) -> Tensor:
    """[len(ids)]: this rank's numbers out of those of all groups, [groups, G]."""
    return grouped.flatten()[list(ids)]


def at_tokens(of_samples: Tensor, lengths: Tensor) -> list[Tensor]:
    """One number a sample, [batch], at each token of its response: per sample [response]."""
    return [x.expand(n) for x, n in zip(of_samples, lengths.tolist(), strict=True)]


def is_whole(rollout: Columns, options: PolicyOptions) -> Tensor:
    """[batch] bool: whether a response ended by itself, and was not cut off at `max_new_tokens`."""
    return torch.tensor(
        [len(r) < options.max_new_tokens or is_stopped(r.cpu().numpy(), options) for r in responses(rollout)]
    )


def importance_columns(rollout: Columns, old: Columns | None, options: PolicyOptions) -> dict[str, list[Tensor]]:
    """The column `importance` [response], where the options ask for a correction.

    Raises:
        UserError: there is no column `old_logprob` to correct to.
    """
    if options.importance_correction == "none":
        return {}
    logprobs = None if old is None else old.get("old_logprob")
    if logprobs is None:
        raise UserError(
            f"importance_correction={options.importance_correction!r} weighs the log-probabilities of the generation "
            "against those of the policy before training, and there is no column old_logprob; compute it by a call "
            "of the actor on the rollouts, or set importance_correction to none"
        )
    lengths = lengths_of(rollout.logprob)
    weights = importance_weights(
        torch.cat(rollout.logprob),
        torch.cat(logprobs),
        lengths,
        options.importance_correction,
        (options.importance_low, options.importance_high),
    )
    return {"importance": list(weights.split(lengths.tolist()))}


def valid_column(is_valid: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The column `valid`: per sample [1], of the dtype and device of the column `like`."""
    return list(is_valid.to(like[0].device, like[0].dtype).split(1))


def filtered_stats(made: Mapping[str, object], rollout: Columns, scores: Columns, ref: Columns | None) -> Stats:
    """Statistics of all rollouts that were scored, where a function leaves out some of them for training.

    An update of a script gives these itself, of what it trains on; those here replace them. {} where nothing is left
    out (no column `valid` among the `made` ones).
    """
    if "valid" not in made:
        return {}
    columns = {"prompt": rollout.prompt, "seq": rollout.seq, "logprob": rollout.logprob, "reward": scores.reward}
    valid = scores.get("valid")
    if valid is not None:
        columns["valid"] = valid
    return rollout_stats(columns if ref is None else columns | {"ref_logprob": ref.ref_logprob})


def rollout_stats(columns: Mapping[str, Sequence[Tensor]]) -> Stats:
    """Of the rollouts as they were drawn, of the samples that count.

    Args:
        columns: `prompt`, `seq`, and what there is of `reward`, `logprob`, `ref_logprob`, `valid`.

    Returns:
        `response_length`; with its column `reward_mean` (of sums over a response's tokens); with `logprob` `entropy`
        (sampled), and with a reference too `kl` (a token's mean of log(policy / reference)) and `kl_per_sequence`. {}
        where no sample counts.
    """
    places = list(range(len(columns["seq"])))
    if "valid" in columns:
        places = [place for place in places if bool(columns["valid"][place] > 0)]
    if not places:
        return {}

    def of(name: str) -> Tensor:
        return torch.cat([columns[name][place] for place in places])

    count = float(len(places))
    tokens = float(sum(len(columns["seq"][place]) - len(columns["prompt"][place]) for place in places))
    stats: Stats = {"response_length": (tokens, count)}
    if "reward" in columns:
        stats["reward_mean"] = mean_of(sums_of([columns["reward"][place].double() for place in places]))
    if "logprob" in columns:
        logprob = of("logprob")
        stats["entropy"] = mean_of(-logprob)
        if "ref_logprob" in columns:
            kl, _ = mean_of(kl_k1(logprob, of("ref_logprob")))
            stats |= {"kl": (kl, tokens), "kl_per_sequence": (kl, count)}
    return stats
