"""What the calls of `beside_job.py` do."""

import sys
import time
from pathlib import Path

import torch
from beside_job import Bonus, MeetingReference, Rule

from realhf.algorithms.ppo.interface import PPOReferenceInterface
from realhf.algorithms.statistics import mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model
from tests.waiting import wait_until


def begins(meeting: str, here: str, step: int) -> None:
    if meeting:
        (Path(meeting) / f"{here} begins in {step}").touch()


def comes_after(meeting: str, what: str, step: int) -> None:
    if meeting:
        wait_until((Path(meeting) / f"{what} in {step}").exists, f"{what} in step {step}")


class RuleInterface:
    def __init__(self, config: Rule):
        self._config = config

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        begins(self._config.meeting, "rule", context.step)
        if context.step == self._config.fails_in:
            return self._fail(batch)
        comes_after(self._config.meeting, "reference ends", context.step)
        texts = [row["prompt"] for row in context.rows(batch.ids)]
        raw = torch.stack(
            [seq.double().sin().mean() + len(text) / 7 for seq, text in zip(batch.data["seq"], texts, strict=True)]
        )
        mean = context.in_order(batch.ids, raw).mean()
        return CallResult(outputs={"score": list((raw - mean).split(1))}, stats={"rule_score": mean_of(raw)})

    def _fail(self, batch: Batch) -> CallResult:
        match self._config.fails_as:
            case "nan":
                return CallResult(outputs={"score": [torch.tensor([float("nan")])] * len(batch)})
            case "exit":
                sys.exit("the rule gives up")
            case "hang":
                time.sleep(3600)
        raise ValueError("the rule is broken")


class BonusInterface:
    def __init__(self, config: Bonus):
        pass

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        data = batch.data
        lengths = [len(seq) - len(prompt) for prompt, seq in zip(data["prompt"], data["seq"], strict=True)]
        return CallResult(
            outputs={"reward": [score + length / 100 for score, length in zip(data["score"], lengths, strict=True)]}
        )


class MeetingReferenceInterface(PPOReferenceInterface):
    def __init__(self, config: MeetingReference):
        super().__init__(config)
        self._meeting = config.meeting

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        comes_after(self._meeting, "rule begins", context.step)
        result = super().inference(model, batch, context)
        if self._meeting:
            (Path(self._meeting) / f"reference ends in {context.step}").touch()
        return result
