"""Rewards on texts as a model function call."""

import math
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from realhf.algorithms.script.evaluate import Evaluation
from realhf.algorithms.statistics import add_stats, prefixed
from realhf.algorithms.text_reward.config import TextReward
from realhf.algorithms.text_reward.samples import sample_of
from realhf.data.tokenizer import TextTokenizer
from realhf.engine.batch import Batch
from realhf.engine.exact_sums import term
from realhf.engine.interface import CallResult, Context, Model, Stats
from realhf.engine.returned import InterfaceError
from realhf.machine.host import read_host
from realhf.rewards.details import RewardDetails
from realhf.rewards.jobs import RewardError
from realhf.rewards.pool import FunctionOptions, RewardPool, Score
from realhf.rewards.signature import Sample


class TextRewardInterface:
    """See `TextReward`."""

    def __init__(self, config: TextReward):
        self.config = config
        self._tokenizer = _tokenizer(config.tokenizer)
        try:
            # Before the first step: what the functions import takes its time.
            self._pool = _pool(config.rewards, _options(config))
        except RewardError as error:
            raise InterfaceError(str(error)) from error

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        pool, config = self._pool, self.config
        evaluation = Evaluation(batch, context, config.reports)
        rollouts = evaluation.batch(config.batch)
        samples = self._samples(rollouts, context)
        try:
            scores = pool.score(samples)
        except RewardError as error:
            raise InterfaceError(str(error)) from error
        if not context.holds_outputs:
            return CallResult()
        device = rollouts.data["seq"][0].device
        columns: tuple[list[tuple[float, ...]], ...] = (
            [score.of_tokens or (score.reward,) for score in scores],
            [(float(score.is_valid),) for score in scores],
        )
        outputs = {key: _column(values, device) for key, values in zip(config.output_data, columns, strict=False)}
        asked = dict.fromkeys(column for function in pool.functions for column in function.columns)
        return CallResult(
            outputs=outputs,
            stats=evaluation.stats | prefixed(config.prefix, statistics(pool.names, scores)),
            details={
                sample.id: RewardDetails(
                    rewards=score.values,
                    columns={name: _text(sample.row[name]) for name in asked if name in sample.row},
                    notes=score.extra,
                )
                for sample, score in zip(samples, scores, strict=True)
            },
        )

    def _samples(self, batch: Batch, context: Context) -> list[Sample]:
        samples = []
        columns = (batch.ids, batch.data["prompt"], batch.data["seq"], context.rows(batch.ids))
        for id, prompt, seq, row in zip(*columns, strict=True):
            tokens = seq[len(prompt) :].tolist()
            sample = sample_of(
                row,
                prompt=self._tokenizer.decode(prompt.tolist()),
                response=self.response_text(tokens),
                tokens=tokens,
                with_tokens=self._pool.wants_tokens,
                token_texts=self._tokenizer.pieces(tokens) if self._pool.wants_token_texts else (),
            )
            samples.append(replace(sample, id=id, step=context.steps_made, steps=context.steps))
        return samples

    def response_text(self, tokens: Sequence[int]) -> str:
        """The text of a response without special tokens, and without the end token or stop string that ended it."""
        if tokens and tokens[-1] == self.config.eos_token:
            return self._tokenizer.decode(tokens[:-1])
        text = self._tokenizer.decode(tokens)
        before = len(self._tokenizer.decode(tokens[:-1])) if self.config.stop_strings and tokens else 0
        for stop in self.config.stop_strings:
            place = text.rfind(stop)
            if place >= 0 and place + len(stop) > before:  # the last token completed it
                return text[:place]
        return text


def statistics(names: Sequence[str], scores: Sequence[Score]) -> Stats:
    """Those of `TextReward`, of some of its samples."""
    counted = [term(score.reward) for score in scores if score.is_valid]
    stats: Stats = {
        "reward_total": (sum(counted), len(counted)),
        "reward_failures": (float(sum(bool(score.failures) for score in scores)), len(scores)),
        "reward_seconds": (sum(score.seconds for score in scores), len(scores)),
    }
    for name in names:
        values = [term(value) for score in scores if (value := score.values.get(name)) is not None]
        stats[f"reward_{name}"] = (sum(values), len(values))
    logged = add_stats([score.metrics for score in scores])
    return logged | stats


def _text(value: Any) -> str:
    """A text as it is; null as the files have it."""
    return "null" if value is None else str(value)


def _column(values: Sequence[Sequence[float]], device: torch.device) -> list[Tensor]:
    """Per sample [values] float32."""
    flat = torch.tensor([*chain(*values)], dtype=torch.float32, device=device)
    return list(flat.split([len(of_sample) for of_sample in values]))


@lru_cache(maxsize=8)  # a tokenizer takes a second to read
def _tokenizer(location: str) -> TextTokenizer:
    return TextTokenizer(location)


def _options(config: TextReward) -> FunctionOptions:
    return config.pool_options(max(1, read_host().cores // _workers_on_this_host()))


@cache  # training and evaluation share one; its processes end with the worker
def _pool(rewards: tuple[str, ...], options: FunctionOptions) -> RewardPool:
    return RewardPool(rewards, options)


def _workers_on_this_host() -> int:
    workers = dist.get_world_size() if dist.is_initialized() else 1
    return math.ceil(workers / int(os.environ.get("SLURM_NNODES", "1")))
