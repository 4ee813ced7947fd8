"""What the calls of `beside_job.py` do."""

import os
from pathlib import Path

import torch
from beside_job import Bonus, MeetingReference, Rule

from realhf.algorithms.script.rollouts import LogprobsInterface
from realhf.algorithms.statistics import mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model
from tests.waiting import wait_until


def rule_begins() -> str:
    """Of this worker: the rule begins on every one, the reference runs on one of them."""
    return f"rule begins on {os.getpid()}"


def says(meeting: str, what: str, step: int) -> None:
    if meeting:
        (Path(meeting) / f"{what} in {step}").touch()


def comes_after(meeting: str, what: str, step: int) -> None:
    if meeting:
        wait_until((Path(meeting) / f"{what} in {step}").exists, f"{what} in step {step}")


class RuleInterface:
    def __init__(self, config: Rule):
        self._config = config

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        says(self._config.meeting, rule_begins(), context.step)
        trouble = Path(self._config.trouble)
        if trouble.is_file():
            step, kind = trouble.read_text().split()
            if context.step == int(step):
                return _in_trouble(kind, batch, context)
        comes_after(self._config.meeting, "reference ends", context.step)
        texts = [row["prompt"] for row in context.rows(batch.ids)]
        raw = torch.stack(
            [seq.double().sin().mean() + len(text) / 7 for seq, text in zip(batch.data["seq"], texts, strict=True)]
        )
        state = context.state
        state["steps"] = state.get("steps", 0.0) + 1
        state["sum"] = state.get("sum", 0.0) + float(context.in_order(batch.ids, raw).mean())
        mean = state["sum"] / state["steps"]
        return CallResult(outputs={"score": list((raw - mean).split(1))}, stats={"rule_score": mean_of(raw)})


def _in_trouble(kind: str, batch: Batch, context: Context) -> CallResult:
    match kind:
        case "nan":
            return CallResult(outputs={"score": [torch.tensor([float("nan")])] * len(batch)})
        case "state":
            context.state["own"] = float(batch.ids[0])
            return CallResult(outputs={"score": [torch.zeros(1).double()] * len(batch)})
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


class MeetingReferenceInterface(LogprobsInterface):
    def __init__(self, config: MeetingReference):
        super().__init__(config)
        self._meeting = config.meeting

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        comes_after(self._meeting, rule_begins(), context.step)
        result = super().inference(model, batch, context)
        says(self._meeting, "reference ends", context.step)
        return result
